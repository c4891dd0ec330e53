"""What an image requires of the node: `NVIDIA_REQUIRE_*` in, the condition that does not hold out. Pure."""
