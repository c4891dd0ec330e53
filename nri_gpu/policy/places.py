"""Kinds of settings that are places, or patterns of names, for every section alike."""

from __future__ import annotations

from typing import Final

from nri_gpu.policy.kinds import Folder, Patterns, Text

SOCKET_PATH_MAX: Final = 107  # bytes: sun_path of a Unix socket holds 108 with its NUL (Linux: unix(7))

# Printable ASCII without blanks, because these paths are shown in refusals; no part of a path is "." or "..".
_PATH: Final = r"(?:/(?!\.\.?(?:/|$))[!-.0-~]+)+"
ANY_FOLDER: Final = Folder(rf"/|{_PATH}/?", 'an absolute path without blanks, "." or ".."', 1024)
FOLDER: Final = Folder(rf"{_PATH}/?", 'an absolute path below / without blanks, "." or ".."', 1024)
FOLDER_OR_NONE: Final = Folder(rf"|{_PATH}/?", 'empty or an absolute path below / without blanks, "." or ".."', 1024)
ROOT_OR_NONE: Final = Folder(rf"|/|{_PATH}/?", 'empty or an absolute path without blanks, "." or ".."', 1024)
FILE_OR_NONE: Final = Text(rf"|{_PATH}", 'empty or an absolute path without blanks, "." or ".."', 1024)
SOCKET: Final = Text(_PATH, 'an absolute path to a socket without blanks, "." or ".."', SOCKET_PATH_MAX)
SOCKET_OR_NONE: Final = Text(rf"|{_PATH}", "empty or an absolute path to a socket", SOCKET_PATH_MAX)
NAMESPACES: Final = Patterns(Text(r"[!-~]+", "a pattern of printable ASCII without blanks", 253))
