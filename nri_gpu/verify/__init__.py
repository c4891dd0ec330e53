"""`nri-gpu verify`: the state of each container by runtime and kernel, compared with its signed grant."""
