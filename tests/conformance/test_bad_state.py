"""A state folder that is full, files in it that were cut or edited, a clock that jumps: never a wider grant.

On one containerd: what is granted is decided before the runtime's version matters.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS, Launch, staged
from tests.support.little import NriGpuInLittle
from tests.support.marks import on_newest
from tests.support.waiting import wait_for

pytestmark = on_newest

# Said when a file of the state folder cannot be written, and what does not depend on it.
COMPLAINTS: Final = (
    "ledger.json not written; signed grants on containers stay valid",
    "journal not written; signed grants on containers stay valid",
    "audit log not written; nothing else depends on it",
)
JUMPING: Final = """
import itertools, time
steps = itertools.cycle((0, 86400 * 4000, -86400 * 4000, 60, -61, 0.5))
real, time.time = time.time, lambda: real() + next(steps)
"""


def test_a_folder_that_fills_up_costs_nobody_a_grant(node: Containerd, launch: Launch) -> None:
    with NriGpuInLittle(launch.with_policy(""), 512) as daemon:
        daemon.wait_staged()
        daemon.fill()
        for number in range(3):
            node.cri.run_asking(f"device={number}", f"p{number}")
        assert "[gpu-busy]" in node.cri.refused("device=0", "late").details
        assert "[gpu-busy]" in node.cri.refused("device=0; mode=shared", "later").details
        for complaint in COMPLAINTS:
            daemon.wait_logged(complaint)
        launch.with_policy('[defaults]\nmode = "shared"\n')
        daemon.hang_up()
        daemon.wait_logged("policy not kept for the next start")
        node.cri.run_asking("device=3", "p3")
        node.cri.run_asking("device=3", "beside")
        # Once, and again where a file that was replaced meanwhile gave a little room back; not for each of the seven.
        assert {daemon.log().count(complaint) for complaint in COMPLAINTS} <= {1, 2}

        (daemon.folder / "filler").unlink()
        node.cri.run_asking("device=3", "again")
        daemon.wait_held(
            {f"p{n}/main": [UUIDS[n]] for n in range(4)} | {f"{name}/main": [UUIDS[3]] for name in ("beside", "again")}
        )


def test_a_folder_that_is_gone_is_told_and_a_restart_makes_another(node: Containerd, launch: Launch) -> None:
    with staged(launch) as daemon:
        node.cri.run_asking("device=0", "one")
        launch.state.rename(launch.base / "elsewhere")
        daemon.wait_logged("state folder removed or replaced while nri-gpu runs")
        assert "[gpu-busy]" in node.cri.refused("device=0", "late").details
        daemon.restart()
        daemon.wait_staged()
        assert "[gpu-busy]" in node.cri.refused("device=0", "later").details
        node.cri.run_asking("device=1", "two")


def nobody(content: bytes) -> bytes:
    """As one would edit it who wants those GPUs."""
    return content.replace(b"GPU-0a", b"GPU-3a").replace(b'"at"', b'"settled"').replace(b"exclusive", b"shared")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda content: content[: len(content) // 2], id="half of it"),
        pytest.param(nobody, id="edited by hand"),
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(lambda content: b"\xff\0{" * len(content), id="noise"),
    ],
)
def test_files_cut_or_edited_by_hand(node: Containerd, launch: Launch, spoil: Callable[[bytes], bytes]) -> None:
    """What runs holds what it held, and what was only created too."""
    with staged(launch) as daemon:
        node.cri.run_asking("device=0", "one")
        created = node.cri.create(node.cri.asking("device=1", "two"))
        held = {"one/main": [UUIDS[0]], "two/main": [UUIDS[1]]}
        daemon.wait_held(held)
        wait_for("the audit log", lambda: (launch.state / "audit.jsonl").exists(), 20)
        daemon.kill()
        for name in ("ledger.json", "journal", "audit.jsonl"):
            file = launch.state / name
            file.write_bytes(spoil(file.read_bytes()))
        spoilt = (launch.state / "ledger.json").read_bytes()
        daemon.start()
        daemon.wait_staged()
        node.cri.run_asking("device=2", "three")
        wait_for("ledger.json", lambda: (launch.state / "ledger.json").read_bytes() != spoilt, 20)
        daemon.wait_held(held | {"three/main": [UUIDS[2]]})
        for number in range(3):
            assert "[gpu-busy]" in node.cri.refused(f"device={number}; mode=shared", f"late-{number}").details
        node.cri.start(created)


def test_a_wall_clock_that_jumps_decides_nothing(node: Containerd, launch: Launch, tmp_path: Path) -> None:
    """Each look at it is years from the one before; grants, graces and the connection go by another."""
    (tmp_path / "jumping").mkdir()
    (tmp_path / "jumping/sitecustomize.py").write_text(JUMPING)
    path = f"{tmp_path / 'jumping'}:{Path(__file__).parents[2]}"
    with staged(replace(launch, environment={"PYTHONPATH": path})) as daemon:
        node.cri.run_asking("device=0", "one")
        created = node.cri.create(node.cri.asking("device=1", "two"))  # its grace is not over
        for number in range(8):
            assert "[gpu-busy]" in node.cri.refused(f"device={number % 2}", f"late-{number}").details
        node.cri.start(created)
        daemon.wait_held({"one/main": [UUIDS[0]], "two/main": [UUIDS[1]]})
        assert daemon.log().count("registered") == 1
        assert len({json.loads(line)["at_s"] // 3e7 for line in audit(launch)}) > 1  # so it did jump


def audit(launch: Launch) -> list[str]:
    file = launch.state / "audit.jsonl"
    wait_for("the audit log", lambda: file.exists() and '"at_s"' in file.read_text(), 20)
    return [line for line in file.read_text().splitlines() if '"at_s"' in line]
