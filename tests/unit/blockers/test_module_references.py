"""References to the driver's modules: explained by files, holders and console, the rest named as not explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest
from msgspec import Struct

from nri_gpu.blockers.module_references import PER_FILE_MAX, Console, DriverModule, module_blockers, unload_order

UVM, DRM = DriverModule("nvidia_uvm", 0), DriverModule("nvidia_drm", 0)
MODESET: Final = DriverModule("nvidia_modeset", 1, ("nvidia_drm",))
FRAMEBUFFER: Final = Console(("/sys/class/vtconsole/vtcon1/bind",))


def nvidia(references: int | None, *more: str) -> DriverModule:
    return DriverModule("nvidia", references, ("nvidia_modeset", "nvidia_uvm", *more))


class Case(Struct, frozen=True):
    """Modules, open files of each, and the lines that are said."""

    modules: tuple[DriverModule, ...]
    lines: tuple[str, ...]
    files: Mapping[str, int] = {}
    console: Console = Console()


CASES: Final[Mapping[str, Case]] = {
    "nobody but the driver's own": Case((nvidia(2), UVM, MODESET, DRM), ()),
    "open files, each with more than one": Case((nvidia(2 + 3 * PER_FILE_MAX), UVM, MODESET, DRM), (), {"nvidia": 3}),
    "more than files have": Case(
        (nvidia(4 + PER_FILE_MAX), UVM, MODESET, DRM),
        ("references to nvidia: 2 references not explained",),
        {"nvidia": 1},
    ),
    "none that the kernel counts": Case((nvidia(None),), ()),
    "GPUDirect's": Case(
        (
            nvidia(5, "gdrdrv", "nvidia_fs", "nvidia_peermem"),
            *(DriverModule(each, 0) for each in ("nvidia_fs", "gdrdrv")),
            DriverModule("nvidia_peermem", 2),
        ),
        (
            "module gdrdrv: uses nvidia",
            "module nvidia_fs: uses nvidia",
            "module nvidia_peermem: uses nvidia and has 2 references not explained",
        ),
    ),
    "the console's": Case(
        (nvidia(2), UVM, DriverModule("nvidia_modeset", 2, ("nvidia_drm",)), DriverModule("nvidia_drm", 2)),
        ("console of the kernel: is on the framebuffer of nvidia_drm, nvidia_modeset",),
        console=FRAMEBUFFER,
    ),
    "a console that has none": Case((nvidia(2), UVM, MODESET, DRM), (), console=FRAMEBUFFER),
    "a graphical one without a console": Case(
        (nvidia(2), UVM, MODESET, DriverModule("nvidia_drm", 1)),
        ("references to nvidia_drm: 1 reference not explained",),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_has_references(case: Case) -> None:
    found = tuple(module_blockers(case.modules, case.files, case.console))
    assert tuple(f"{each.kind} {each.name}: {each.what}" for each in found) == case.lines
    assert all(each.next for each in found)


def test_modules_are_unloaded_after_what_uses_them() -> None:
    odd = (DriverModule("a", 1, ("b",)), DriverModule("b", 1, ("a",)))
    modules = (nvidia(3, "nvidia_fs"), MODESET, DRM, UVM, DriverModule("nvidia_fs", 0), *odd)
    assert unload_order(modules) == ["nvidia_fs", "nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia", "a", "b"]
