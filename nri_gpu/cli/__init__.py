"""The command line: a table of verbs, and one file for each."""
