"""The inventory of this machine: its GPUs, read through NVML in a child process, and what the kernel shows."""
