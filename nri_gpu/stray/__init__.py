"""Stray use: processes that have NVIDIA's device nodes open although nobody granted it to them."""
