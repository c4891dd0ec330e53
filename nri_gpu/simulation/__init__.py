"""Simulated nodes, described by topology files: for demos, tests and clusters without GPUs."""
