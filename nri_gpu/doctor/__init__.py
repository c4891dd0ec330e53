"""`nri-gpu doctor`: what is wrong on this node, from the kernel to the container, and how to fix it. Only reads."""
