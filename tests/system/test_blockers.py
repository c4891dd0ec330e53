"""`nri-gpu blockers` names real processes that hold a node, by what they belong to. The node's kernel is made up."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from nri_gpu.domain.errors import Exit
from nri_gpu.mps.mps_daemon import CONTROL, SERVER
from nri_gpu.system.process import Process
from tests.support.holding import FULL, HOLDER, ZERO, cgroup_of, holding, into
from tests.support.schemas import conforming
from tests.system.test_process_scan import AS_DROP_IN, CLOSED, ON_THE_HOST, WITHOUT
from tests.unit.host.host_tree import HostTree, address
from tests.unit.verify.test_oci_bundles import annotated, write

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes device nodes")
ID: Final = "cd" * 32
# What this machine lets root see of it all.
QUIET: Final = Exit.PERMISSION if CLOSED else Exit.OK if ON_THE_HOST else Exit.UNAVAILABLE


@pytest.fixture
def card() -> Iterator[Path]:
    """A terminal that no other process has open, by a number that even other machines' terminals seldom have."""
    *rest, (ours, theirs) = [os.openpty() for _ in range(100)]
    path = Path(os.ttyname(theirs))
    for each in (theirs, *itertools.chain.from_iterable(rest)):
        os.close(each)
    yield path
    os.close(ours)


@pytest.fixture
def host(tmp_path: Path, card: Path) -> HostTree:
    """A node whose GPU 0 has that terminal as its node in /dev/dri."""
    tree = HostTree(tmp_path / "host").loaded()
    for minor in tree.minors:
        tree.bind(minor, "nvidia")
    number = card.stat().st_rdev
    tree.write(f"sys/bus/pci/devices/{address(0)}/drm/card0/dev", f"{os.major(number)}:{os.minor(number)}\n")
    return tree


def held(card: Path, *before: str) -> AbstractContextManager[Process]:
    """A process that has it open. before: what its command line begins with."""
    script = f"import os\nos.open({str(card)!r}, os.O_RDWR | os.O_NOCTTY)\n{HOLDER}"
    return holding(card, script=script, before=before)


def asked(host: HostTree, *words: str, before: Sequence[str] = ()) -> tuple[int, Any]:
    """The exit code and the document."""
    command = [*before, sys.executable, "-m", "nri_gpu", "blockers", *words, "--root", str(host.base), "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, conforming(json.loads(done.stdout))


def only(host: HostTree, *words: str) -> Any:  # noqa: ANN401 - parsed JSON
    code, document = asked(host, *words)
    [found] = document["keeps_loaded"]
    assert code == Exit.FINDING
    return found


def test_nobody(host: HostTree) -> None:
    code, document = asked(host)
    assert (document["keeps_loaded"], code) == ([], QUIET)


def test_a_process_that_holds_a_node(host: HostTree, card: Path) -> None:
    with cgroup_of("alone") as cgroup, held(card, *into(cgroup)) as process:
        found = only(host)
        assert pids(found) == [process.pid]
        assert (found["kind"], found["nodes"]) == ("process", ["/dev/dri/card0"])
        assert found["next"] == [f"kill {process.pid}"]
        assert only(host, "0") == found
        assert asked(host, address(1))[1]["keeps_loaded"] == []
    assert asked(host)[1]["keeps_loaded"] == []


def test_a_node_of_the_drivers_major(host: HostTree, tmp_path: Path) -> None:
    """As if /dev/zero and its like, which any process may have open, were the driver's."""
    host.write("proc/devices", f"Character devices:\n  {ZERO[0]} nvidia\n")
    with cgroup_of("alone") as cgroup, holding(tmp_path, ZERO, FULL, before=into(cgroup)) as process:
        _, document = asked(host)
    [found] = [each for each in document["keeps_loaded"] if process.pid in pids(each)]
    assert {"/dev/nvidia5", "/dev/nvidia7"} <= {*found["nodes"]}


def pids(blocker: Any) -> list[int]:  # noqa: ANN401 - parsed JSON
    return [each["pid"] for each in blocker["processes"]]


def test_references_that_an_open_file_explains(host: HostTree, card: Path) -> None:
    host.write("sys/module/nvidia_drm/refcnt", "1\n")
    assert only(host)["kind"] == "references"
    with held(card):
        assert only(host)["kind"] == "process"


def test_a_process_of_a_container(host: HostTree, card: Path) -> None:
    """By the container's cgroup, though its spec has no such node: its device rules may have been widened."""
    write(host.base / "run/containerd", annotated(), id_=ID)
    with cgroup_of(ID) as cgroup, held(card, *into(cgroup)):
        found = only(host)
    assert (found["kind"], found["pod"], found["container_ids"]) == ("pod", "train", [ID])
    assert found["next"][-1] == "kubectl -n research delete pod train"


MAPS: Final = """\
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def mapping(path: Path, *before: str) -> Iterator[int]:
    path.write_bytes(b"x" * 4096)
    command = [*before, sys.executable, "-I", "-c", MAPS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "open\n"
        yield child.pid
        child.stdin.close()


def test_a_program_that_maps_libcuda_breaks_and_keeps_nothing(host: HostTree, tmp_path: Path) -> None:
    with (
        cgroup_of("alone") as cgroup,
        mapping(tmp_path / "libcuda.so.580.95.05", *into(cgroup)) as pid,
        mapping(tmp_path / "libcudart.so.12", *into(cgroup)) as other,
    ):
        code, document = asked(host)
    [found] = [each for each in document["will_break"] if {pid, other}.intersection(pids(each))]
    assert (code, document["keeps_loaded"], pids(found), found["libcuda"]) == (QUIET, [], [pid], True)
    assert found["what"].startswith(f"maps libcuda, pid {pid} ")


@contextmanager
def shell(program: Path, script: str, *words: Path, **environment: str) -> Iterator[int]:
    """A shell by the name of another program, until it has read a line."""
    shutil.copy(Path("/bin/sh").resolve(), program)
    command = [str(program), "-c", script, "sh", *map(str, words)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment or None
    ) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "open\n"
        yield child.pid
        child.stdin.close()


def test_an_mps_server_is_ended_by_its_control_daemon(host: HostTree, card: Path, tmp_path: Path) -> None:
    server = tmp_path / SERVER
    shutil.copy(Path("/bin/sh").resolve(), server)
    script = 'exec 8<&0; "$1" -c \'exec 9<>"$1"; echo open; read line\' sh "$2" <&8 & wait'
    with shell(tmp_path / CONTROL, script, server, card, CUDA_MPS_PIPE_DIRECTORY="/tmp/a b", KEY="secret") as pid:
        found = only(host)
    assert (found["kind"], found["name"]) == ("MPS daemon", f"with pid {pid}")
    assert found["next"] == [f"echo quit | CUDA_MPS_PIPE_DIRECTORY='/tmp/a b' {CONTROL}"]
    assert "secret" not in json.dumps(found)


def test_a_program_whose_name_has_control_characters(host: HostTree, card: Path, tmp_path: Path) -> None:
    with shell(tmp_path / "a\x1b[2J\n;b", 'exec 9<>"$1"; echo open; read line', card):
        done = subprocess.run(
            [sys.executable, "-m", "nri_gpu", "blockers", "--root", str(host.base)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert r"a\x1b[2J\n;b" in done.stdout
    assert "\x1b" not in done.stdout


def test_what_may_not_be_seen_is_said(host: HostTree, card: Path) -> None:
    """Without rights it exits with 77, and with 1 all the same where it sees a blocker."""
    code, document = asked(host, before=WITHOUT)
    assert (code, document["denied"]) == (Exit.PERMISSION, True)
    assert any(each.endswith("processes have open: be root on the host") for each in document["unseen"])
    number = card.stat().st_rdev
    device = {"path": "/dev/x", "type": "c", "major": os.major(number), "minor": os.minor(number)}
    write(host.base / "run/containerd", {"linux": {"devices": [device]}}, pid=None)
    assert asked(host, before=WITHOUT)[0] == Exit.FINDING


HIDDEN: Final = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=ptraceable p /proc; exec "$@"', "sh")


@pytest.mark.parametrize(
    "before",
    [("unshare", "--pid", "--fork", "--mount-proc"), (*HIDDEN, *WITHOUT)],
    ids=["in a pod without hostPID", "hidepid"],
)
def test_processes_that_are_hidden_are_no_quiet_node(host: HostTree, card: Path, before: Sequence[str]) -> None:
    with held(card):
        code, document = asked(host, before=before)
    assert document["keeps_loaded"] == []
    assert code in (Exit.UNAVAILABLE, Exit.PERMISSION)
    assert any(each.startswith("the processes of the whole host") for each in document["unseen"])


def test_the_rights_of_the_drop_in_are_enough(host: HostTree, card: Path) -> None:
    with held(card) as process:
        code, document = asked(host, before=AS_DROP_IN)
    assert (code, pids(document["keeps_loaded"][0])) == (Exit.FINDING, [process.pid])
