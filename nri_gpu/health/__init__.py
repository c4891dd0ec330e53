"""The health of GPUs: events and refreshes lead to states, and containers on bad GPUs are reported or stopped."""
