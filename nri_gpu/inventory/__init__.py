"""What GPUs this machine has: asked of NVML in a child process, or read from a topology file."""
