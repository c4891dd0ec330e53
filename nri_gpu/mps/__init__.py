"""The daemons of NVIDIA's Multi-Process Service on this host: one for each GPU that containers share through it."""
