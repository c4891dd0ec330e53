"""The long-running daemon: its parts, and what it knows of the node, its policy and its grants."""
