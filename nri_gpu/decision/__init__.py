"""What a container gets: asked for, allowed, chosen and planned. Pure."""
