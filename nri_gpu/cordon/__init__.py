"""GPUs that root takes out of use, and back."""
