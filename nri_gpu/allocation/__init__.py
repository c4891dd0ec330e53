"""Who holds which GPU, and which GPUs a claim gets. Knows no protobuf and no clock."""
