"""Units and drop-ins that a node has only where it wants them: `nri-gpu enable` and `disable`."""
