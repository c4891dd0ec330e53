"""The project's errors, by whose fault they are; one table in `nri/codes.py` maps them to codes."""

from __future__ import annotations

import errno
from enum import IntEnum
from os import strerror
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nri_gpu.domain.node import KernelGpu


COMMAND_LINE: Final = "command line"  # stands where a fault names its file


class NriGpuError(Exception):
    """Root of every error this project raises on purpose."""


class LocalProtocolError(NriGpuError):
    """A breach of the protocol by us: a bug. Met in `plugin/supervisor.py`: traceback, close, reconnect."""


class RemoteProtocolError(NriGpuError):
    """A breach of the protocol by the peer, or hostile bytes. Met in `plugin/supervisor.py`: close, reconnect."""


class OversizeError(RemoteProtocolError):
    """A message longer than the limit of its direction.

    length, limit: bytes.
    """

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"message of {length} bytes is over the limit of {limit}")
        self.length = length
        self.limit = limit


class TooManyEntriesError(NriGpuError):
    """A request with more entries of a kind than are read. Met in `plugin/nri_service.py`: that request is refused."""

    def __init__(self, what: str, count: int, limit: int) -> None:
        super().__init__(f"this container has {count} {what}, over the limit of {limit}: remove some and try again.")


class InventoryError(NriGpuError):
    """A failure to ask the driver, or a wrong topology file. The last snapshot stays, its age grows.

    unlisted: GPUs that the kernel shows all the same. faults: of a topology file.
    """

    def __init__(self, message: str, unlisted: tuple[KernelGpu, ...] = (), faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(message)
        self.unlisted = unlisted
        self.faults = faults


class DriverError(NriGpuError):
    """A failure to find or stage the driver's files. Says which folders were searched."""


class RequestError(NriGpuError):
    """An annotation that cannot be understood.

    key: the annotation's key. message: what is wrong, without the place. position: 0-based offset into its value, None
    when the key itself is wrong.
    """

    def __init__(self, key: str, message: str, position: int | None = None) -> None:
        place = key if position is None else f"{key} at character {position + 1}"
        super().__init__(f"{place}: {message}")
        self.key = key
        self.message = message
        self.position = position


class Fault(Struct, frozen=True):
    """A fault in a file that an operator wrote."""

    file: str
    key: str  # dotted key path, or empty for the file as a whole
    message: str
    line: int | None = None  # 1-based, or None if it is not known
    denied: bool = False  # this user may not read it

    def __str__(self) -> str:
        """Return `file:line: key: message`, as compilers print it."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class PolicyError(NriGpuError):
    """A policy file with faults: every one of them at once."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults


class RestartNeededError(NriGpuError):
    """A fault that only a new process can repair: this one exits with the sentence, to be restarted from outside."""


class UnseenError(NriGpuError):
    """A part of the kernel that cannot be looked at. Says what and why, as a clause. denied: for want of permission."""

    def __init__(self, sentence: str, cause: OSError | None = None) -> None:
        super().__init__(sentence)
        self.denied = isinstance(cause, PermissionError)


class Exit(IntEnum):
    """Exit codes; the numbers above 60 are sysexits(3)'s."""

    OK = 0
    FINDING = 1
    USAGE = 2
    UNAVAILABLE = 69
    BUG = 70
    PERMISSION = 77
    CONFIGURATION = 78

    @classmethod
    def of(cls, error: OSError) -> Exit:
        """Return the code for a thing that could not be read or written."""
        return cls.PERMISSION if isinstance(error, PermissionError) else cls.UNAVAILABLE

    @classmethod
    def of_input(cls, error: OSError) -> Exit:
        """Return the code for a file that the command line names, and that could not be read."""
        return cls.PERMISSION if isinstance(error, PermissionError) else cls.CONFIGURATION

    @classmethod
    def of_faults(cls, faults: Iterable[Fault]) -> Exit:
        """Return the code for faults of files, or of nothing but options."""
        found = tuple(faults)
        if any(fault.denied for fault in found):
            return cls.PERMISSION
        return cls.USAGE if all(fault.file == COMMAND_LINE for fault in found) else cls.CONFIGURATION


class CommandError(NriGpuError):
    """A command cannot be carried out: it ends with this code, after the sentence was printed."""

    def __init__(self, code: Exit, sentence: object) -> None:
        super().__init__(f"nri-gpu: {sentence}")
        self.code = code


_CLEARER: Final = {  # than the system's own texts
    strerror(errno.ENOENT): "no such file",
    strerror(errno.EISDIR): "it is a folder",
}


def cause_of(error: OSError) -> str:
    """Return why the system refused something, as a clause without the file's name and without a number."""
    text = error.strerror or str(error) or type(error).__name__
    return _CLEARER.get(text, text)


def fault_of(error: Exception) -> str:
    """Return what an error says: one of the system's as `FILE: no such file`, any other in its own words."""
    if not isinstance(error, OSError):
        return str(error) or repr(error)
    return f"{error.filename}: {cause_of(error)}" if error.filename else cause_of(error)
