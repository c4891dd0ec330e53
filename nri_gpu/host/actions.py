"""What can be done to a host, as values: planned, printed, compared, and only then performed."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from nri_gpu.host.facts import DevPath, Module, Node


class LoadModule(Struct, frozen=True):
    """Have the kernel load a module, by the program that it would use itself."""

    UNDONE: ClassVar[str] = "not loaded"
    module: Module

    @property
    def subject(self) -> str:
        """What the action is about."""
        return f"module {self.module}"

    def __str__(self) -> str:
        return f"load module {self.module}"


class MakeNode(Struct, frozen=True):
    """Make a node, and its folder where that is missing. replaces: the node with another number that goes first."""

    UNDONE: ClassVar[str] = "not made"
    path: DevPath
    node: Node
    replaces: Node | None = None

    @property
    def subject(self) -> str:
        """What the action is about."""
        return f"/dev/{self.path}"

    def __str__(self) -> str:
        instead = f", instead of {self.replaces.major}:{self.replaces.minor}" if self.replaces else ""
        return f"make /dev/{self.path}: {self.node}{instead}"


class FixNode(Struct, frozen=True):
    """Give a node that has the right number its mode and owner. was: how it is now."""

    UNDONE: ClassVar[str] = "not changed"
    path: DevPath
    node: Node
    was: Node

    @property
    def subject(self) -> str:
        """What the action is about."""
        return f"/dev/{self.path}"

    def __str__(self) -> str:
        before = f"was mode {self.was.mode:04o}, owner {self.was.uid}:{self.was.gid}"
        return f"fix /dev/{self.path}: {self.node} ({before})"


class MakeLink(Struct, frozen=True):
    """Make a link in /dev/char. replaces: the target of the link that goes first."""

    UNDONE: ClassVar[str] = "not made"
    path: DevPath
    target: str
    replaces: str | None = None

    @property
    def subject(self) -> str:
        """What the action is about."""
        return f"/dev/{self.path}"

    def __str__(self) -> str:
        instead = f", instead of {self.replaces}" if self.replaces else ""
        return f"link /dev/{self.path} to {self.target}{instead}"


Action = LoadModule | MakeNode | FixNode | MakeLink
