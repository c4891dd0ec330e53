"""The ways to lead a container's dynamic loader to the driver's libraries."""

from __future__ import annotations

from enum import StrEnum


class Loader(StrEnum):
    """Where the libraries are mounted, and whether LD_LIBRARY_PATH leads there; docs/loader.md says who is served."""

    FOLDERS = "folders"
    TREE = "tree"
    HWCAPS = "hwcaps"
    FILES = "files"
