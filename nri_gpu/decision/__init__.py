"""The decision of what a container gets: its request is read, checked, placed and planned. Pure."""
