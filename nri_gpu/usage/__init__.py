"""Usage: what GPUs and their holders do, as samples show it. Nothing of nri-gpu acts on it."""
