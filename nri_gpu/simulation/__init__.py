"""A node described by a topology file instead of by NVML: for demos, tests and clusters without GPUs."""
