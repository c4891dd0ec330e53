"""The project's errors, by whose fault they are; one table in `nri/codes.py` maps them to codes."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from nri_gpu.domain.node import KernelGpu


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

    unlisted: GPUs that the kernel shows all the same.
    """

    def __init__(self, message: str, unlisted: tuple[KernelGpu, ...] = ()) -> None:
        super().__init__(message)
        self.unlisted = unlisted


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


class CommandError(NriGpuError):
    """A command cannot be carried out: it ends with this code, after the sentence was printed."""

    def __init__(self, code: Exit, sentence: object) -> None:
        super().__init__(f"nri-gpu: {sentence}")
        self.code = code
