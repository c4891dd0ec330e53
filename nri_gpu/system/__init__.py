"""The parts of the operating system that several features need: files, processes, notifications."""
