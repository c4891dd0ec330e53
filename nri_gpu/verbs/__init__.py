"""One file a verb: the only prints and exit codes besides cli.py."""
