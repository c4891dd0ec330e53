"""What several features need of the operating system: files, processes, notifications."""
