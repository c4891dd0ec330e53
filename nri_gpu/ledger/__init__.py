"""The ledger: who holds which GPU, in one value. It knows no protobuf and no clock."""
