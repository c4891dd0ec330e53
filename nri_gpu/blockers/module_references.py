"""The references to the driver's kernel modules: who has them, as far as the kernel tells. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.blockers.blocker import Blocker, BlockerKind
from nri_gpu.domain.text import counted, listed, shown

# In the order in which they are unloaded.
DRIVER: Final = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
DRAWING: Final = frozenset({"nvidia_drm", "nvidia_modeset"})  # which the kernel's console may use
# The kernel takes a reference for an open file, one more for a device with an owner, and the driver another up to 535.
# Linux: fs/char_dev.c, chrdev_open.
PER_FILE_MAX: Final = 3


class DriverModule(Struct, frozen=True):
    """A module. holders: modules that use it. references: or None if the kernel does not count them."""

    name: str
    references: int | None
    holders: tuple[str, ...] = ()


class Console(Struct, frozen=True):
    """The kernel's consoles on a framebuffer of the driver's. files: that take each off it, by a 0."""

    files: tuple[str, ...] = ()


def module_blockers(modules: Iterable[DriverModule], files: Mapping[str, int], console: Console) -> Iterator[Blocker]:
    """Yield what else keeps the modules loaded. files: how often a node of a module is open.

    References that can be of open files count as those, so a lack shows once the files are closed.
    """
    loaded = {each.name: each for each in modules}
    left = {
        each.name: each.references - len(each.holders) - PER_FILE_MAX * files.get(each.name, 0)
        for each in loaded.values()
        if each.references is not None
    }
    drawn = {name: count for name, count in left.items() if name in DRAWING and count > 0} if console.files else {}
    if drawn:
        yield Blocker(
            kind=BlockerKind.CONSOLE,
            name="of the kernel",
            what=f"is on the framebuffer of {listed(sorted(drawn))}",
            next=tuple(f"echo 0 > {file}" for file in console.files),
            references=sum(drawn.values()),
        )
    for name in unload_order(loaded.values()):
        more = f" and has {counted(count, 'reference')} not explained" if (count := max(left.get(name, 0), 0)) else ""
        if name not in DRIVER:
            users = [each.name for each in loaded.values() if name in each.holders]
            yield Blocker(
                kind=BlockerKind.MODULE,
                name=shown(name),
                what=f"uses {listed(sorted(users))}{more}",
                next=(f"modprobe -r {shown(name)}",),
                references=loaded[name].references,
            )
        elif more and name not in drawn:
            yield Blocker(
                kind=BlockerKind.REFERENCES,
                name=f"to {name}",
                what=f"{counted(count, 'reference')} not explained",
                next=("# look again once all above has ended; if they stay, only a reboot ends them",),
                references=count,
            )


def unload_order(modules: Iterable[DriverModule]) -> list[str]:
    """Return the modules, each after those that use it."""
    left, ordered = {each.name: {*each.holders} for each in modules}, list[str]()
    while left:
        # Of the driver's own the order is known; among others modules that hold each other cannot be.
        free = [name for name in left if left[name].isdisjoint(left)] or [*left]
        nearest = min(free, key=lambda name: (DRIVER.index(name) if name in DRIVER else -1, name))
        ordered.append(nearest)
        del left[nearest]
    return ordered
