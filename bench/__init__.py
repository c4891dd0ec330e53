"""What nri-gpu costs: `python -m bench`."""
