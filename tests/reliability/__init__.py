"""The reliability record: attacks on the program, each counted, with its outcome and the command that repeats it.

`make reliability` runs all parts. docs/reliability.md has the record of the last full run.
"""
