"""The host's needs before containers can be given GPUs: kernel modules, device nodes, /dev/char links."""
