"""The report: readable at any width, one section for each part, whatever happens to one of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from nri_gpu.cli.page import json_text
from nri_gpu.doctor.examine import summary, to_text
from nri_gpu.system.sockets import SocketState, socket_state
from tests.support.schemas import conforming
from tests.unit.doctor.node import DoctorNode, installed


@pytest.mark.parametrize("width", [40, 80, 200])
def test_only_a_line_to_copy_is_wider(node: DoctorNode, width: int) -> None:
    node.remove("dev/nvidia1")
    found = node.examine(status=None, silence=FileNotFoundError())
    commands = {line.partition("    # ")[0].rstrip() for each in found.findings for line in each.fix}
    for line in to_text(found, width).splitlines():
        assert len(line) <= width or line.strip() in commands, line


def test_the_json(node: DoctorNode) -> None:
    document = conforming(json.loads(json_text(node.examine())))
    assert [each["name"] for each in document["sections"]][:3] == ["driver", "host", "container runtime"]
    assert document["counts"]["error"] == 0


def test_the_summary_of_a_healthy_node(node: DoctorNode) -> None:
    found = node.examine()
    assert summary(found) == f"0 errors, 0 warnings, {len(list(found.findings))} ok."


def test_sockets(node: DoctorNode) -> None:
    node.dead_socket("run/dead.sock")
    node.write("run/file.sock", "")
    states = {name: socket_state(node.root / f"run/{name}.sock") for name in ("nri/nri", "dead", "none", "file")}
    assert list(states.values()) == [SocketState.LIVE, SocketState.DEAD, SocketState.MISSING, SocketState.OTHER]


def test_a_look_at_a_socket_is_not_heard(node: DoctorNode) -> None:
    listener = node.listen("run/other.sock")
    listener.setblocking(False)
    assert socket_state(node.root / "run/other.sock") is SocketState.LIVE
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_busy_node_takes_less_than_two_seconds(node: DoctorNode) -> None:
    installed(node)
    for number in range(1000):
        node.process(10_000 + number, "python3", "train.py")
    began = time.process_time()  # what others use of the machine does not count
    assert node.found().keys() == {"other injectors"}
    assert time.process_time() - began < 2


def test_it_changes_nothing(node: DoctorNode) -> None:
    def everything() -> dict[str, tuple[int, ...]]:
        found = {path: path.lstat() for path in node.root.rglob("*")}
        return {str(path): (each.st_mode, each.st_size, each.st_mtime_ns) for path, each in found.items()}

    before = everything()
    node.examine()
    assert everything() == before


def test_nvml_is_not_loaded(node: DoctorNode) -> None:
    program = "import sys; from nri_gpu.cli.main import main; main(sys.argv[1:]); print('pynvml' in sys.modules)"
    command = [sys.executable, "-c", program, "doctor", "--root", str(node.root), "--state-dir", "/none"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
