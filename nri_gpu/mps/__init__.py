"""The daemons of NVIDIA's Multi-Process Service, one for each GPU that containers share through it."""
