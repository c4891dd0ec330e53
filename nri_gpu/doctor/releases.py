"""The configuration files that each release of containerd reads, and how it reads them."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

EACH_MIGRATED: Final = (2, 3)  # the first release that migrates each file by itself
# The first release that refuses a number for a duration, and the first that takes it again, for nanoseconds. Of those
# before some builds do: it is the go-toml of 2.3 that refuses.
NUMBERS_REFUSED: Final = ((2, 3), (2, 4))


class ReleaseReading(Struct, frozen=True):
    """The reading of files by the releases of containerd from one on."""

    release: tuple[int, ...]
    newest: int  # the highest version of a file with which they start
    uri: re.Pattern[str]  # how plugins that are disabled or required must be called
    last: bool = False  # the version of the last file that has one counts, else each
    root: bool = False  # no import may have a higher version than the main file
    named: bool = False  # plugins with settings must be called so, too


_URI_1: Final = re.compile(r"io\.containerd\.[^.]*\..*")
_URI_2: Final = re.compile(r".*\..*")
# containerd: services/server/config/config.go (1.x, ValidateV2), cmd/containerd/server/config/config.go (2.x,
# LoadConfig, ValidateVersion) of each tag; the refusal of 2.3.0 was reverted in 2.3.5.
READINGS: Final = (
    ReleaseReading((2, 3, 5), 4, _URI_2),
    ReleaseReading((2, 3), 4, _URI_2, root=True),
    ReleaseReading((2,), 3, _URI_2, last=True),
    ReleaseReading((1, 7, 17), 2, _URI_1, last=True, named=True),
    ReleaseReading((1, 7), 1 << 30, _URI_1, last=True, named=True),
    ReleaseReading((1, 6, 32), 2, _URI_1, last=True, named=True),
    ReleaseReading((0,), 1 << 30, _URI_1, last=True, named=True),
)
