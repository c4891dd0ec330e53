"""Generated from the .proto files beside this folder; do not edit."""
