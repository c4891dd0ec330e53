"""`nri-gpu gpus --watch`: a daemon is followed where one runs, the node itself is looked at elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec.structs import replace

from nri_gpu.cli.client import ask
from nri_gpu.cli.gpus import Printer
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.health import Sign
from nri_gpu.domain.names import CONTROL_SOCKET
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.waiting import wait_for
from tests.unit.cli.shapes import GPUS, check_shape

PATIENCE_S = 40.0
NOW = 1_800_000_000.0
AT = "2027-01-15 08:00:00 UTC"
NODE = make.inventory(make.gpus(2))
HOT = replace(NODE, gpus=(replace(NODE.gpus[0], signs=(Sign.THERMAL,)), NODE.gpus[1]))


def printer(*, as_json: bool) -> tuple[Printer, list[str]]:
    said: list[str] = []
    return Printer(as_json=as_json, say=said.append, clock=lambda: NOW), said


def test_the_first_whole_and_then_a_line_with_its_time_for_each_change() -> None:
    printing, said = printer(as_json=False)
    for inventory in (NODE, HOT, NODE):
        printing.publish(inventory)
    printing.fault("no driver")
    assert said[0].startswith("2 GPUs, driver")
    assert said[1:] == [
        f"{AT} GPU 0 ({make.uuid(0)}) shows thermal",
        f"{AT} GPU 0 ({make.uuid(0)}) no longer shows thermal",
        f"{AT} not refreshed: no driver",
    ]


def test_for_programs_a_document_a_line_with_what_changed() -> None:
    printing, said = printer(as_json=True)
    printing.publish(NODE)
    printing.publish(HOT)
    printing.fault("no driver")
    documents = [json.loads(line) for line in said]
    for document in documents:
        check_shape(document, GPUS)
        assert document["at_s"] == NOW
    kinds = [[change["kind"] for change in document["changes"]] for document in documents]
    assert kinds == [[], ["sign"], ["answer"]]
    assert documents[1]["changes"][0]["gpu_uuid"] == make.uuid(0)
    assert documents[2]["gpus"] == documents[1]["gpus"]


@contextmanager
def watching(*options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nri_gpu", "gpus", "--watch", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        patience = threading.Timer(PATIENCE_S, process.kill)
        patience.start()
        try:
            yield process
        finally:
            patience.cancel()
            process.kill()


def line_with(stream: IO[str] | None, words: str) -> str:
    assert stream
    seen = []
    for line in stream:
        if words in line:
            return line
        seen.append(line)
    raise AssertionError(f"no line with {words!r}: {seen}")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    file = tmp_path / "node.toml"
    file.write_text(FOUR_GPUS.read_text() + "\n[[change]]\nat_s = 0.3\ngpu = 1\nlost = true\n")
    return file


def test_what_changes_is_printed_until_told_to_stop(node: Path) -> None:
    with watching("--gpus", str(node)) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("4 GPUs")
        assert "GPU 1 " in line_with(process.stdout, "is unavailable: GPU is lost")
        node.write_text("schema = 2\n")
        line_with(process.stdout, "not refreshed: ")
        process.terminate()
        assert process.wait(10) == Exit.OK
        assert process.stderr
        assert process.stderr.read() == ""


def test_who_reads_no_more_ends_it(node: Path) -> None:
    with watching("--gpus", str(node), "-o", "json") as process:
        assert process.stdout
        documents = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [bool(document["gpus"][1]["unavailable"]) for document in documents] == [False, True]
        process.stdout.close()
        node.write_text(FOUR_GPUS.read_text())
        assert process.wait(10) == Exit.OK


def test_a_policy_with_a_fault_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("nonsense = 1\n")
    with watching("--policy", str(tmp_path / "policy.toml")) as process:
        assert process.wait(10) == Exit.CONFIGURATION


def answers(daemon: NriGpu) -> Callable[[], bool]:
    def asked() -> bool:
        try:
            return bool(status(daemon)["gpus"])
        except OSError:
            return False

    return asked


def status(daemon: NriGpu) -> Mapping[str, Any]:
    return ask(daemon.launch.state / CONTROL_SOCKET, "status")


def test_a_daemon_is_followed_away_and_back(folder: Path) -> None:
    """Health, which nobody else knows; with the time of the daemon, and nothing lost that was short."""
    topology = folder / "node.toml"
    topology.write_text(FOUR_GPUS.read_text())
    with NriGpu(Launch(folder / "d", socket=folder / "none.sock", topology=topology)) as daemon:
        wait_for("its control socket", answers(daemon), 20)
        with watching("--gpus", str(topology), "--state-dir", str(daemon.launch.state)) as process:
            assert process.stdout
            assert process.stdout.readline().startswith("4 GPUs")
            topology.write_text(FOUR_GPUS.read_text().replace("[[gpu]]\n", '[[gpu]]\nsigns = "remap-failed"\n', 1))
            daemon.hang_up()
            line_with(process.stdout, "shows remap-failed")
            line = line_with(process.stdout, "is bad, because of: a row of its memory could not be remapped")
            health = status(daemon)["gpus"][0]["health"]
            assert line.startswith(time.strftime("%Y-%m-%d %H:%M", time.gmtime(health["since_s"])))
            daemon.terminate()
            line_with(process.stdout, "lost the daemon")
            assert line_with(process.stdout, "GPUs, driver").startswith("4 GPUs")
            daemon.start()
            line_with(process.stdout, "found a daemon")
            assert "bad since" in line_with(process.stdout, " 0 ")
