"""The part of a container's OCI runtime spec that is read.

An environment often holds secrets: the decoder drops all of it but the variables that are named to it. Source:
opencontainers/runtime-spec config.md, config-linux.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec
from msgspec import Struct

from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.names import NVIDIA_HOOKS


class SpecDevice(Struct, frozen=True):
    path: str
    type: str = ""
    major: int = -1
    minor: int = -1


class SpecRule(Struct, frozen=True):
    """A rule for devices. type empty: every kind. major, minor None or negative: every number."""

    allow: bool = False
    type: str = ""
    major: int | None = None
    minor: int | None = None
    access: str = ""

    def fits(self, major: int, minor: int) -> bool:
        """Return whether the rule is about opening this character device."""
        return (
            self.type in ("", "a", "c")
            and _any(self.major) in (-1, major)
            and _any(self.minor) in (-1, minor)
            and not {*"rw"}.isdisjoint(self.access)
        )

    @property
    def everything(self) -> bool:
        """Return whether it is the rule of a privileged container."""
        return self.allow and self.type in ("", "a") and _any(self.major) == _any(self.minor) == -1


class SpecMount(Struct, frozen=True):
    destination: str
    source: str = ""


class Variables(dict[str, str]):
    """The variables of an environment that are kept, by name; the last of a name holds."""


class SpecProcess(Struct, frozen=True):
    env: Variables | None = None


class SpecResources(Struct, frozen=True):
    devices: tuple[SpecRule, ...] | None = None


class SpecLinux(Struct, frozen=True):
    devices: tuple[SpecDevice, ...] | None = None
    resources: SpecResources | None = None


class SpecHook(Struct, frozen=True):
    """A program that the runtime runs beside the container."""

    path: str
    args: tuple[str, ...] | None = None


class Spec(Struct, frozen=True):
    """The spec. A list that is left out may also be null."""

    annotations: Mapping[str, str] | None = None
    process: SpecProcess | None = None
    mounts: tuple[SpecMount, ...] | None = None
    linux: SpecLinux | None = None
    hooks: Mapping[str, tuple[SpecHook, ...] | None] | None = None

    @property
    def nvidia_hooks(self) -> tuple[str, ...]:
        """Return NVIDIA's programs among its hooks, by name: by path, or as the first argument."""
        hooks = [hook for stage in (self.hooks or {}).values() for hook in stage or ()]
        paths = [path for hook in hooks for path in (hook.path, *(hook.args or ())[:1])]
        return tuple(sorted({path.rpartition("/")[2] for path in paths} & NVIDIA_HOOKS))

    @property
    def nodes(self) -> tuple[SpecDevice, ...]:
        devices = self.linux.devices if self.linux else None
        return tuple(each for each in devices or () if each.type in ("c", "u"))

    @property
    def rules(self) -> tuple[SpecRule, ...]:
        resources = self.linux.resources if self.linux else None
        return (resources.devices if resources else None) or ()

    def opens(self, number: DeviceNumber) -> bool:
        """Return whether its rules open a character device: the last rule that fits holds."""
        return next((rule.allow for rule in reversed(self.rules) if rule.fits(*number)), False)

    @property
    def env(self) -> Mapping[str, str]:
        """Return the variables that were kept."""
        return (self.process.env if self.process else None) or {}

    @property
    def privileged(self) -> bool:
        """Return whether it may use every device of the host."""
        return any(rule.everything for rule in self.rules)


def spec_decoder(variables: Set[str]) -> msgspec.json.Decoder[Spec]:
    """Return a decoder that keeps of an environment these variables, and nothing of any other."""
    beginnings = tuple(f"{name}=" for name in variables)

    def kept(_: type[Variables], pairs: object) -> Variables:
        found = (each for each in msgspec.convert(pairs, list[str]) if each.startswith(beginnings))
        return Variables(each.split("=", 1) for each in found)

    return msgspec.json.Decoder(Spec, dec_hook=kept)


def _any(number: int | None) -> int:
    return -1 if number is None or number < 0 else number
