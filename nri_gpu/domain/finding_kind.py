"""The kinds of an observer's findings."""

from enum import StrEnum


class FindingKind(StrEnum):
    """The kinds of an observer's findings, as status and metrics name them."""

    NOT_GIVEN = "opened-not-given"
    PRIVILEGED = "opened-by-privileged"  # one line for all such pods
    REACHABLE = "openable-by-another"
    TWICE = "given-twice"
    UNOPENED = "never-opened"
    DRIVERS = "several-drivers"
    LOST_RULES = "lost-device-rules"
    XID = "xid"
