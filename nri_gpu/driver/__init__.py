"""The host driver's user space: found below a driver root, and staged per generation as folders to mount."""
