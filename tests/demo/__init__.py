"""`make demo`: the main job on this machine, with a real containerd."""
