"""NRI: containers, events and replies from and to protobuf, the session, the status codes."""
