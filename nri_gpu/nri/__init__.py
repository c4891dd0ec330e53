"""NRI in our words: protobuf to domain and back, the session, the status codes."""
