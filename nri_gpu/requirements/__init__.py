"""What an image requires of the node by `NVIDIA_REQUIRE_*`, and which condition does not hold."""
