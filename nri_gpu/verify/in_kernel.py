"""The kernel's rules for a process: the devices its cgroups let it open, and the mounts where it lives.

On a host that has both, cgroup v1's list and the eBPF programs of cgroup v2 must each let a device through (Linux:
security/device_cgroup.c, devcgroup_check_permission). Nothing here asks the container or its runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.errors import UnseenError, cause_of
from nri_gpu.system.cgroups import DEVICES, UNIFIED, Mounted, cgroups_of, hierarchies, mounts_of, parsed
from nri_gpu.system.proc import PROC
from nri_gpu.verify import bpf
from nri_gpu.verify.bpf_program import READ, WRITE, Program, lets_through, parse_program

_LETTERS: Final = {READ: "r", WRITE: "w"}


class UnmountedError(UnseenError):
    """A process's cgroups are in no hierarchy that is mounted here."""


class DeviceRule(Struct, frozen=True):
    """A line of v1's devices.list. kind: a, b or c. None: any number. access: of the letters rwm."""

    kind: str
    major: int | None
    minor: int | None
    access: str

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read `c 195:0 rw` or `a *:* rwm`. Raises: ValueError."""
        kind, numbers, access = line.split()
        major, minor = (None if number == "*" else int(number) for number in numbers.split(":"))
        return cls(kind, major, minor, access)

    def lets_through(self, access: int, major: int, minor: int) -> bool:
        """Return whether the rule lets a character device through.

        If v1 allows all but some devices, it lists only `a *:* rwm`.
        """
        wanted = {letter for bit, letter in _LETTERS.items() if access & bit}
        numbers = self.major in (None, major) and self.minor in (None, minor)
        return self.kind in "ac" and numbers and wanted <= {*self.access}


# Most containers of a node have the same rules.
_rule: Final = lru_cache(1024)(DeviceRule.parse)
_program: Final = lru_cache(64)(parse_program)


class DeviceFilter(Struct, frozen=True):
    """The devices that one process may open.

    rules: of cgroup v1, or None if it has none. programs: of cgroup v2; all of them must let a device through.
    """

    rules: tuple[DeviceRule, ...] | None = None
    programs: tuple[Program, ...] = ()

    def lets_through(self, access: int, number: DeviceNumber) -> bool:
        """Return whether a character device may be opened for all of this access. Raises: UnseenError."""
        if self.rules is not None and not any(rule.lets_through(access, *number) for rule in self.rules):
            return False
        return all(lets_through(code, access, *number) for code in self.programs)

    def opens(self, number: DeviceNumber) -> bool:
        """Return whether it may be opened at all: the driver lets a GPU be used through a descriptor of either kind."""
        return self.lets_through(READ, number) or self.lets_through(WRITE, number)


class Kernel:
    """The host's cgroups. programs: returns the ids of a cgroup's programs. code: returns the bytes of a program."""

    def __init__(
        self,
        proc: Path = PROC,
        *,
        programs: Callable[[Path], Iterable[int]] = bpf.effective_programs,
        code: Callable[[int], bytes] = bpf.instructions,
    ) -> None:
        """Read our own mounts. Raises: UnseenError."""
        self.proc = proc
        self.mounts = mounts_of("self", proc)
        self._places = hierarchies(self.mounts)
        self._programs = programs
        self._code = code

    def device_filter(self, pid: int, container: str) -> DeviceFilter:
        """Return what a container's first process may open.

        Raises: UnseenError: also if it is not in that container.
        """
        cgroups, places = cgroups_of(pid, self.proc), self._places
        if not any(container in path for path in cgroups.values()):
            raise UnseenError(f"process {pid}, which its runtime names, is in no cgroup of this container")
        legacy, unified = cgroups.get(DEVICES), cgroups.get(UNIFIED)
        rules = None if legacy is None else _rules(places, legacy)
        if unified is None or (where := places.get(UNIFIED)) is None:
            if rules is None:
                raise UnmountedError("no hierarchy of cgroups that filters devices is mounted here")
            return DeviceFilter(rules)
        return DeviceFilter(rules, tuple(self._read_programs(_below(where, unified))))

    def _read_programs(self, cgroup: Path) -> Iterator[Program]:
        try:
            raw = [self._code(program) for program in self._programs(cgroup)]
        except OSError as error:
            sentence = f"the eBPF programs of {cgroup} cannot be read: {cause_of(error)}"
            raise UnseenError(sentence, error) from error
        for each in raw:
            if not each:
                raise UnseenError("the kernel hides the eBPF program that filters its devices: net.core.bpf_jit_harden")
            yield _program(each)


def staged_by_mounts(stage_dir: Path, host: Iterable[Mounted], inside: Iterable[Mounted]) -> frozenset[str]:
    """Return the entries of the stage folder that are mounted inside.

    host: our own mounts. stage_dir: without symlinks.
    """
    holding = [each for each in host if stage_dir.is_relative_to(each.place)]
    if not holding:
        return frozenset()
    holder = max(reversed(holding), key=lambda each: len(each.place))  # of several at one place the last is seen
    folder = str(Path(holder.root) / stage_dir.relative_to(holder.place)).rstrip("/") + "/"
    below = (each.root for each in inside if each.device == holder.device and each.root.startswith(folder))
    return frozenset(root.removeprefix(folder).partition("/")[0] for root in below)


def _rules(places: Mapping[str, Path], path: str) -> tuple[DeviceRule, ...]:
    if DEVICES not in places:
        raise UnmountedError("the devices controller of cgroup v1 is not mounted here")
    return tuple(parsed(_below(places[DEVICES], path) / "devices.list", _rule))


def _below(where: Path, path: str) -> Path:
    if path.startswith("/.."):
        raise UnmountedError(f"its cgroup {path} is above what is mounted here: run this on the host, not in a pod")
    return where / path.lstrip("/")
