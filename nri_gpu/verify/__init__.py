"""`nri-gpu verify`: what the runtime and the kernel show of each container, compared with its signed grant."""
