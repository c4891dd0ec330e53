"""The host driver's user space: found below a driver root, staged once per generation as folders to mount whole."""
