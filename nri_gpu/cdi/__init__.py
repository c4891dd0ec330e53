"""CDI specifications of the node's GPUs, for Docker, podman and whatever else reads them."""
