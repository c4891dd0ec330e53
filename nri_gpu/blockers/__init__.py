"""Blockers: who keeps the driver loaded, who breaks when it is replaced, and what ends each."""
