"""The files that outlive the process."""
