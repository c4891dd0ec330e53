"""The kubelet's device plugin, what PodResources lists, and node labels. gRPC is imported only where it is wanted."""
