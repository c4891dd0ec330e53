"""What events and looks mean for a GPU: states, with hold-down."""
