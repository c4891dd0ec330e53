"""Dynamic Resource Allocation: GPUs as devices that the scheduler allocates to ResourceClaims."""
