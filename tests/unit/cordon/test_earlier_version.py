"""Audit logs and snapshots between this version and the last that knows of no GPU out of use, in both directions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.released import BEFORE_CORDONS, PROJECT, released

# By either version's own code: one decision in an audit log, and a snapshot.
WRITE = """
import asyncio, sys, time
from pathlib import Path
from nri_gpu.decision.decide import decide
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.records.audit import AuditLog
from nri_gpu.verify.node_snapshot import Evidence, Snapshot, to_bytes
from tests.support import builders as make

folder, node = Path(sys.argv[1]), make.node()
if sys.argv[2:] == ["cordoned"]:
    from nri_gpu.domain.gpu import Cordon
    node = make.node([make.gpu(0, cordon=Cordon(frozenset({"uid"}))), make.gpu(1)])

async def write():
    log, container = AuditLog(folder, 1 << 20, time.time), make.container("1")
    running = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    log.decided(container, decide(container, node, Ledger(), Policy.default()), node, 0.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

asyncio.run(write())
evidence = Evidence(boot_id="b", program="p", module_version="m", settings=(), host=(), staged=(), sight="s")
snapshot = Snapshot(evidence=evidence, inventory=node.inventory, driver=node.driver)
(folder / "snapshot.json").write_bytes(to_bytes(snapshot, bytes(32)))
"""
READ = """
import sys
from pathlib import Path
from nri_gpu.verify.node_snapshot import SnapshotError, read_snapshot
try:
    print(len(read_snapshot(Path(sys.argv[1]), bytes(32)).inventory.gpus))
except SnapshotError as error:
    print("none")
"""
TODAY = str(PROJECT)


def run(program: list[str], *words: object, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, *map(str, words)]
    env = {"PYTHONPATH": f"{path}:{TODAY}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd="/", timeout=60)


@pytest.fixture(scope="module")
def before() -> str:
    return released(BEFORE_CORDONS)["PYTHONPATH"]


def gpus_in_snapshot(folder: Path, path: str) -> str:
    done = run(["-c", READ], folder, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("upgrade", [True, False], ids=["theirs by us", "ours by them"])
def test_where_none_is_out_of_use_each_reads_the_others(tmp_path: Path, before: str, upgrade: bool) -> None:
    writer, reader = (before, TODAY) if upgrade else (TODAY, before)
    done = run(["-c", WRITE], tmp_path, path=writer)
    assert done.returncode == 0, done.stderr
    assert "cordon" not in (tmp_path / "audit.jsonl").read_text() + (tmp_path / "snapshot.json").read_text()
    replayed = run(["-m", "nri_gpu"], "replay", tmp_path / "audit.jsonl", path=reader)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert gpus_in_snapshot(tmp_path, reader) == "4"


def test_where_one_is_it_counts_as_none_there_and_not_as_one_in_use(tmp_path: Path, before: str) -> None:
    """A version that does not know that a GPU is out of use decides nothing by a record of it."""
    done = run(["-c", WRITE], tmp_path, "cordoned", path=TODAY)
    assert done.returncode == 0, done.stderr
    replayed = run(["-m", "nri_gpu"], "replay", tmp_path / "audit.jsonl", path=before)
    assert replayed.returncode not in (0, 70)
    assert "Traceback" not in replayed.stderr
    assert "cordon" in replayed.stdout + replayed.stderr
    assert gpus_in_snapshot(tmp_path, before) == "none"
    assert run(["-m", "nri_gpu"], "replay", tmp_path / "audit.jsonl", path=TODAY).returncode == 0
    assert gpus_in_snapshot(tmp_path, TODAY) == "2"
