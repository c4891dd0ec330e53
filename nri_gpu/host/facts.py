"""What is on the host, and the actions that prepare it: values only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Final, NewType

from msgspec import Struct, field

from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.node import Majors

DevPath = NewType("DevPath", str)  # below /dev: `nvidia0`, `nvidia-caps/nvidia-cap3`, `char/195:0`

CHAR: Final = DevPath("char")
CAPS: Final = DevPath("nvidia-caps")


class HostError(NriGpuError):
    """A file of the host cannot be understood, or a change failed. Says which and why."""


class KernelModule(StrEnum):
    """Kernel modules, each after those that it depends on."""

    NVIDIA = "nvidia"
    UVM = "nvidia-uvm"
    MODESET = "nvidia-modeset"


class HostPaths(Struct, frozen=True):
    """Where the host's trees are; tests have their own."""

    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


class CharDevice(Struct, frozen=True):
    """A character device node, existing or wanted. mode: permission bits only."""

    major: int
    minor: int
    mode: int
    uid: int
    gid: int

    @property
    def number(self) -> tuple[int, int]:
        """Major and minor."""
        return self.major, self.minor

    def __str__(self) -> str:
        return f"char {self.major}:{self.minor}, mode {self.mode:04o}, owner {self.uid}:{self.gid}"


class Symlink(Struct, frozen=True):
    """A symbolic link. target: as written, not followed."""

    target: str

    def __str__(self) -> str:
        return f"a symbolic link to {self.target}"


class Directory(Struct, frozen=True):
    """A directory, not a link to one."""

    def __str__(self) -> str:
        return "a directory"


class OtherFile(Struct, frozen=True):
    """Any other file. kind: `a regular file`, `a block device`, and so on."""

    kind: str

    def __str__(self) -> str:
        return self.kind


DevEntry = CharDevice | Symlink | Directory | OtherFile


class Finding(Struct, frozen=True):
    """Something for the administrator to fix. reason: what is wrong with the path, and what to do."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class HostFacts(Struct, frozen=True, kw_only=True):
    """The host at one moment. Texts are files of the kernel's, unparsed; empty where there is no such file.

    devices: PCI addresses of NVIDIA's display devices. modules: those loaded. params: /proc/driver/nvidia/params.
    gpus: PCI address -> its `information` file. capabilities: `gpu0/mig/gi1/access` -> that file, while the instance
    exists. mig_minors: /proc/driver/nvidia-caps/mig-minors. entries: what is in /dev. unreadable: files that exist and
    could not be read.
    """

    devices: tuple[str, ...] = ()
    modules: frozenset[KernelModule] = frozenset()
    majors: Majors = field(default_factory=Majors)
    params: str = ""
    gpus: Mapping[str, str] = field(default_factory=dict)
    capabilities: Mapping[str, str] = field(default_factory=dict)
    mig_minors: str = ""
    entries: Mapping[DevPath, DevEntry] = field(default_factory=dict)
    unreadable: tuple[Finding, ...] = ()


class LoadModule(Struct, frozen=True):
    """Load a kernel module."""

    UNDONE: ClassVar[str] = "not loaded"
    module: KernelModule

    @property
    def subject(self) -> str:
        """What the action changes."""
        return f"module {self.module}"

    def __str__(self) -> str:
        return f"load module {self.module}"


class MakeNode(Struct, frozen=True):
    """Make a device node, and its directory. replaces: a node with another number, which is removed first."""

    UNDONE: ClassVar[str] = "not made"
    path: DevPath
    node: CharDevice
    replaces: CharDevice | None = None

    @property
    def subject(self) -> str:
        """What the action changes."""
        return f"/dev/{self.path}"

    def __str__(self) -> str:
        instead = f", instead of {self.replaces.major}:{self.replaces.minor}" if self.replaces else ""
        return f"make /dev/{self.path}: {self.node}{instead}"


class FixNode(Struct, frozen=True):
    """Set mode and owner of a node that has the right number. was: the node as it is now."""

    UNDONE: ClassVar[str] = "not changed"
    path: DevPath
    node: CharDevice
    was: CharDevice

    @property
    def subject(self) -> str:
        """What the action changes."""
        return f"/dev/{self.path}"

    def __str__(self) -> str:
        before = f"was mode {self.was.mode:04o}, owner {self.was.uid}:{self.was.gid}"
        return f"fix /dev/{self.path}: {self.node} ({before})"


class MakeLink(Struct, frozen=True):
    """Make a link in /dev/char. replaces: the target of an existing link, which is removed first."""

    UNDONE: ClassVar[str] = "not made"
    path: DevPath
    target: str
    replaces: str | None = None

    @property
    def subject(self) -> str:
        """What the action changes."""
        return f"/dev/{self.path}"

    def __str__(self) -> str:
        instead = f", instead of {self.replaces}" if self.replaces else ""
        return f"link /dev/{self.path} to {self.target}{instead}"


Action = LoadModule | MakeNode | FixNode | MakeLink
