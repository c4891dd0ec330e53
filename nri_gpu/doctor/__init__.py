"""`nri-gpu doctor`: the faults of this node, from the kernel to the container, and how to fix them. Only reads."""
