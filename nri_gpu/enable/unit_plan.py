"""The plan: from what is in /etc/systemd/system and what belongs there to the steps between them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Final, Self

from msgspec import Struct

PACKAGE_DROP_INS: Final = "/usr/share/nri-gpu/systemd"
_MADE: Final = (
    "# Made by `nri-gpu enable`, which `nri-gpu disable` removes unless it was changed. SHA-256 of the rest: "
)


class UnitFile(Struct, frozen=True):
    """A unit or drop-in. target: of a link, else empty. text: of a file."""

    text: str = ""
    target: str = ""

    @classmethod
    def made(cls, text: str) -> Self:
        """Return a copy with the line by which `disable` knows it."""
        return cls(f"{_MADE}{_digest(text)}\n{text}")

    @property
    def ours(self) -> bool:
        """Return whether `enable` made it, and nobody has changed it since."""
        if self.target:
            return self.target.startswith(f"{PACKAGE_DROP_INS}/")
        first, _, rest = self.text.partition("\n")
        return first == f"{_MADE}{_digest(rest)}"


class ChangeFile(Struct, frozen=True):
    """A step: a file becomes another. None: it is not there."""

    path: str
    before: UnitFile | None
    after: UnitFile | None

    def __str__(self) -> str:
        if self.after is None:
            return f"remove {self.path}"
        return f"link {self.path} to {self.after.target}" if self.after.target else f"write {self.path}"


class MoveAside(Struct, frozen=True):
    """A step: a file that is not ours is kept under another name, which systemd does not read."""

    path: str
    kept: str

    def __str__(self) -> str:
        return f"move {self.path} to {self.kept}"


class EnableUnits(Struct, frozen=True):
    """A step: systemd starts these at boot. before: those it starts already, by links that may be wrong now."""

    units: tuple[str, ...]
    before: tuple[str, ...] = ()

    @property
    def verb(self) -> str:
        return "reenable" if self.before else "enable"

    def __str__(self) -> str:
        return f"systemctl {self.verb} {' '.join(self.units)}"


class DisableUnits(Struct, frozen=True):
    """A step: systemd no longer starts these at boot."""

    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"systemctl disable {' '.join(self.units)}"


Step = ChangeFile | MoveAside | EnableUnits | DisableUnits


class EnablePlan(Struct, frozen=True):
    """The steps, in order. foreign: files that `enable` did not make and that these steps leave alone."""

    steps: tuple[Step, ...]
    foreign: tuple[str, ...] = ()

    @property
    def disabled(self) -> tuple[str, ...]:
        return tuple(unit for step in self.steps if isinstance(step, DisableUnits) for unit in step.units)


def plan_enable(
    wanted: Mapping[str, UnitFile | None],
    there: Mapping[str, UnitFile],
    units: Collection[str],
    enabled: Collection[str],
    *,
    replace: bool,
) -> EnablePlan:
    """Return the steps that make `wanted` of `there`, and have units start at boot.

    wanted: by path; None: a file there would hide a package's unit. replace: foreign files are moved aside; without it
    they are in `foreign`, and then no step may be done.
    """
    steps: list[Step] = []
    foreign = []
    changed = set()
    for path, file in wanted.items():
        found = there.get(path)
        if found == file:
            continue
        changed.add(path.rpartition("/")[2])
        if found and not found.ours:
            foreign.append(path)
            steps.append(MoveAside(path, _free_name(path, there)))
            found = None
        if found != file:
            steps.append(ChangeFile(path, found, file))
    if late := tuple(unit for unit in units if unit in changed or unit not in enabled):
        steps.append(EnableUnits(late, before=tuple(unit for unit in late if unit in enabled)))
    return EnablePlan(tuple(steps), () if replace else tuple(foreign))


def plan_disable(
    paths: Collection[str], there: Mapping[str, UnitFile], units: Collection[str], enabled: Collection[str]
) -> EnablePlan:
    """Return the steps that remove what `enable` made. paths: where it makes files. A unit of a foreign file stays."""
    found = {path: there[path] for path in paths if path in there}
    foreign = tuple(path for path, file in found.items() if not file.ours)
    theirs = {path.rpartition("/")[2] for path in foreign}
    steps: list[Step] = []
    if on := tuple(unit for unit in units if unit in enabled and unit not in theirs):
        steps.append(DisableUnits(on))
    steps += (ChangeFile(path, file, None) for path, file in found.items() if file.ours)
    return EnablePlan(tuple(steps), foreign)


def _free_name(path: str, there: Mapping[str, UnitFile]) -> str:
    """Return a name beside the file that neither systemd reads nor another file has."""
    number, kept = 1, f"{path}.old"
    while kept in there:
        number += 1
        kept = f"{path}.old{number}"
    return kept


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
