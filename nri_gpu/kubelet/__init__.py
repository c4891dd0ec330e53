"""The kubelet's device plugin: offers this node's GPUs, so that a scheduler counts them. Imports grpcio."""
