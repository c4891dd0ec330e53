"""Majors out of /proc/devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.node import Majors
from nri_gpu.inventory.kernel import host_majors, majors_by_name, read_majors

NEW = """Character devices:
  1 mem
195 nvidia
195 nvidia-modeset
195 nvidiactl
235 nvidia-caps
236 nvidia-caps-imex-channels
508 nvidia-uvm

Block devices:
  8 sd
259 blkext
"""

CASES = {
    "driver 545 and newer": (NEW, Majors(195, 508, 235, modeset=True)),
    "without nvidia-modeset": (NEW.replace("195 nvidia-modeset\n", ""), Majors(195, 508, 235, modeset=False)),
    "driver 535 has one line": ("Character devices:\n195 nvidia-frontend\n511 nvidia-uvm\n", Majors(195, 511, None)),
    "only the first module": ("Character devices:\n195 nvidia\n", Majors(195, None, None)),
    "names are whole": ("Character devices:\n195 nvidiactl\n196 nvidia-uvmx\n197 xnvidia-caps\n", Majors()),
    "imex channels are not caps": ("Character devices:\n236 nvidia-caps-imex-channels\n", Majors()),
    "block devices do not count": ("Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n", Majors()),
    "nothing before a section": ("195 nvidia\nCharacter devices:\n", Majors()),
    "no driver": ("Character devices:\n  1 mem\n  5 /dev/tty\n", Majors()),
    "rubbish": ("Character devices:\nnvidia 195\n x nvidia\n-1 nvidia\n\u0661 nvidia\n", Majors()),
    "empty": ("", Majors()),
}


@pytest.mark.parametrize(("text", "majors"), CASES.values(), ids=CASES)
def test_majors(text: str, majors: Majors) -> None:
    assert read_majors(text) == majors


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    assert isinstance(host_majors(Path("/proc")), Majors)
    table = tmp_path / "devices"
    table.write_text(NEW)
    assert host_majors(tmp_path) == Majors(195, 508, 235, modeset=True)


def test_a_name_can_have_several_majors() -> None:
    text = "Character devices:\n231 infiniband_verbs\n511 infiniband_verbs\n195 nvidia\nBlock devices:\n9 nvidia\n"
    assert majors_by_name(text) == {"infiniband_verbs": {231, 511}, "nvidia": {195}}


def test_an_unreadable_table_is_an_inventory_error(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="cannot read the majors"):
        host_majors(tmp_path / "absent")
