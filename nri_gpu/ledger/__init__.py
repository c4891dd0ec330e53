"""Who holds which GPU, in one value. Knows no protobuf and no clock."""
