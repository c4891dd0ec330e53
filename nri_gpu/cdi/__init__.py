"""CDI specifications of the node's GPUs, for Docker, podman and others that read them."""
