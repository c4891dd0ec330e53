"""The long-running daemon: puts the parts together, and keeps what it knows of the node, its policy and its grants."""
