"""Exit codes; documented in `nri-gpu --help`."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes; the numbers above 60 are sysexits(3)'s."""

    OK = 0
    FINDING = 1
    USAGE = 2
    UNAVAILABLE = 69
    BUG = 70
    PERMISSION = 77
    CONFIGURATION = 78
