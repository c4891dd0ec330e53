"""The NRI plugin: from a request on the runtime's socket to its answer."""
