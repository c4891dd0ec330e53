"""What nri-gpu costs: `python -m bench`."""

import os

# The bench's own kubelet ends connections on purpose; gRPC, once imported, would say so between the figures.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
