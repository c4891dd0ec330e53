"""A look at the machine's own /proc finds who holds a device node, however it came to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest

from nri_gpu.domain.node import Majors
from nri_gpu.stray.process_scan import FILES_OF_TURN, HOLDERS_MAX, scan
from nri_gpu.stray.stray_controller import LookError, look
from nri_gpu.stray.uses import Extent, Use
from tests.support.holding import FULL, HOLDER, MAJOR, ZERO, cgroup_of, holding, into, path_in_proc
from tests.support.unit_file import OURS, Unit

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes device nodes")
NOBODY = "0"  # of which no process descends
MAJORS = Majors(nvidia=MAJOR)
STRAY: Final = Unit.read(OURS.with_name("nri-gpu.service.d") / "stray.conf")


def scanned(*before: str, owner: str = NOBODY) -> tuple[Mapping[int, Use], Extent]:
    """What a look says, run by such a command."""
    command = [*before, sys.executable, "-I", "-m", "nri_gpu.stray.process_scan", owner, str(MAJOR)]
    lines = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    *uses, extent = (msgspec.json.decode(line, type=Use | Extent) for line in lines)
    assert isinstance(extent, Extent)
    return {each.pid: each for each in uses if isinstance(each, Use)}, extent


def test_a_holder_is_named_with_what_it_holds_and_where_it_is(tmp_path: Path) -> None:
    with cgroup_of("ab" * 32) as cgroup, holding(tmp_path, ZERO, FULL, before=into(cgroup)) as process:
        uses, extent = scanned()
        use = uses[process.pid]
        assert (use.pid, use.started) == (process.pid, process.started)
        assert {ZERO, FULL} <= {*use.numbers}
        assert path_in_proc(cgroup) in use.cgroups
        assert use.program == str(Path(sys.executable).resolve())
        assert extent.whole is ON_THE_HOST
        assert extent.closed == CLOSED < extent.processes
    assert process.pid not in scanned()[0]


ON_THE_HOST = Path("/proc/self/ns/pid").readlink() == Path("pid:[4026531836]")  # PROC_PID_INIT_INO: no container
RIGHTS = ",".join(word.lower().replace("cap_", "+") for word in STRAY.words("CapabilityBoundingSet"))
AS_DROP_IN: Final = ("setpriv", "--bounding-set", f"-all,{RIGHTS}", "--inh-caps", "-all")
NO_ROOT: Final = """\
import ctypes, os, sys
os.open(sys.argv[1], os.O_RDWR)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as exec(2) does: its folder in /proc is its user's then
print("open", flush=True)
sys.stdin.read()
"""


def test_another_users_process_is_found_with_the_drop_ins_rights(tmp_path: Path) -> None:
    with holding(tmp_path, FULL, script=NO_ROOT) as process:
        uses, extent = scanned(*AS_DROP_IN)
    assert FULL in uses[process.pid].numbers
    assert extent.closed <= CLOSED


def test_open_files_are_counted_by_their_nodes(tmp_path: Path) -> None:
    twice = f"import os, sys\nos.open(sys.argv[1], os.O_RDWR)\n{HOLDER}"
    with holding(tmp_path, FULL, script=twice):
        assert files() >= 2


def files() -> int:
    return next((count for *number, count in scanned()[1].files if tuple(number) == FULL), 0)


INNOCENT = {
    "a path is no open device": "os.open(sys.argv[1], os.O_PATH)",
    "nor is a node's inode": "os.stat(sys.argv[1])",
    "what was closed is not open": "os.close(os.open(sys.argv[1], os.O_RDWR))",
}


@pytest.mark.parametrize("does", INNOCENT.values(), ids=INNOCENT.keys())
def test_who_does_not_hold_it_is_not_named(tmp_path: Path, does: str) -> None:
    script = f"import os, sys\n{does}\nprint('open', flush=True)\nsys.stdin.read()"
    with holding(tmp_path, FULL, script=script) as process:
        uses, _ = scanned()
        assert FULL not in (uses[process.pid].numbers if process.pid in uses else ())


OWN_TABLE: Final = """\
import ctypes, os, sys, threading
CLONE_FILES = 0x400
def hold():
    assert ctypes.CDLL(None).unshare(CLONE_FILES) == 0
    os.open(sys.argv[1], os.O_RDWR)
    print("open", flush=True)
    sys.stdin.read()
threading.Thread(target=hold).start()
"""
ENDED: Final = """\
import ctypes, os, sys, threading
os.open(sys.argv[1], os.O_RDWR)
def hold():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    os.write(1, b"open\\n")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit(2), of this thread alone
"""


@pytest.mark.parametrize("script", [OWN_TABLE, ENDED], ids=["with files of its own", "of a process whose first ended"])
def test_a_thread_that_holds_it_is_found(tmp_path: Path, script: str) -> None:
    with holding(tmp_path, FULL, script=script) as process:
        assert FULL in scanned()[0][process.pid].numbers


def test_a_process_whose_first_thread_ended_is_named_with_where_it_is(tmp_path: Path) -> None:
    with cgroup_of("ab" * 32) as cgroup, holding(tmp_path, FULL, script=ENDED, before=into(cgroup)) as process:
        use = scanned()[0][process.pid]
        assert path_in_proc(cgroup) in use.cgroups
        assert use.program == str(Path(sys.executable).resolve())
        assert use.started == process.started


def test_the_owners_own_children_are_left_out(tmp_path: Path) -> None:
    with holding(tmp_path, FULL) as process:
        assert process.pid not in scanned(owner=str(os.getpid()))[0]


def test_an_odd_name_changes_nothing(tmp_path: Path) -> None:
    """A process may call itself `) S 1 (`."""
    script = (
        "import os, sys\nopen('/proc/self/comm', 'w').write(') R 1 (')\nos.open(sys.argv[1], os.O_RDWR)\n"
        "print('open', flush=True)\nsys.stdin.read()"
    )
    with holding(tmp_path, FULL, script=script) as process:
        assert scanned()[0][process.pid].started == process.started


IN_ANOTHERS_PLACE: Final = """\
import os, subprocess, sys, time
number = os.open(sys.argv[1], os.O_RDWR)
script = 'mount --bind "$(realpath "$(command -v sleep)")" "$0" && exec "$0" 60'
child = subprocess.Popen(["unshare", "-rm", "sh", "-c", script, os.path.realpath("/bin/true")], pass_fds=[number])
while os.readlink(f"/proc/{child.pid}/exe") != os.path.realpath("/bin/true"):
    assert child.poll() is None
    time.sleep(0.01)
print("open", flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


def test_a_program_that_a_user_mounted_over_another_is_not_that_one(tmp_path: Path) -> None:
    with holding(tmp_path, FULL, script=IN_ANOTHERS_PLACE):
        programs = {each.program for each in scanned()[0].values()}
    path = Path("/bin/true").resolve()
    assert f"[{path}]" in programs
    assert str(path) not in programs


DEEP: Final = """\
import os, shutil, subprocess, sys
number = os.open(sys.argv[1], os.O_RDWR)
os.chdir(os.path.dirname(sys.argv[1]))
for _ in range(25):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
shutil.copy(os.path.realpath(shutil.which("sh")), "program")
command = ["./program", "-c", "printf /usr/bin/Xorg > /proc/self/comm; echo; read end"]
child = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("open", flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


def test_a_path_that_proc_does_not_show_is_no_other_programs(tmp_path: Path) -> None:
    with holding(tmp_path, FULL, script=DEEP):
        programs = {each.program for each in scanned()[0].values()}
    assert "[/usr/bin/Xorg]" in programs
    assert "/usr/bin/Xorg" not in programs


def test_a_cgroups_name_is_no_line_of_its_own(tmp_path: Path) -> None:
    """Who may make cgroups below its own may name them with all but a newline."""
    with (
        cgroup_of(f"a\v0::/kubepods/{'ab' * 32}/b\u2028c") as cgroup,
        holding(tmp_path, FULL, before=into(cgroup)) as process,
    ):
        cgroups = scanned()[0][process.pid].cgroups
    assert [each for each in cgroups if "kubepods" in each] == [path_in_proc(cgroup)]


MANY: Final = f"""\
import os, sys
os.open(sys.argv[1], os.O_RDWR)
for index in range({HOLDERS_MAX + 9}):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
print("open", flush=True)
sys.stdin.read()
for index in range({HOLDERS_MAX + 9}):
    os.wait()
"""


def test_of_many_processes_some_are_named_and_every_node(tmp_path: Path) -> None:
    """A container's processes are as many as it likes; what one of them alone has open is found."""
    with (
        cgroup_of("many") as cgroup,
        holding(tmp_path, ZERO, script=MANY, before=into(cgroup)),
        holding(tmp_path, ZERO, FULL, before=into(cgroup)),
    ):
        uses = [each for each in scanned()[0].values() if path_in_proc(cgroup) in each.cgroups]
    # Processes are read by pid: the last one is one more, unless the kernel's pids began anew in between.
    assert HOLDERS_MAX <= len(uses) <= HOLDERS_MAX + 1
    assert {number for each in uses for number in each.numbers} == {ZERO, FULL}


MANY_FILES: Final = """\
import os, sys
for index in range(COUNT):
    os.open("/dev/null", os.O_RDONLY | os.O_PATH)
os.open(sys.argv[1], os.O_RDWR)
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def with_files(folder: Path, count: int, cgroup: Path) -> Iterator[int]:
    """A process that has so many files open, and then FULL."""
    script = MANY_FILES.replace("COUNT", str(count))
    with holding(folder, FULL, script=script, before=into(cgroup)) as process:
        yield process.pid


def test_who_has_few_files_open_is_read_first_and_then_the_first_of_each_cgroup(tmp_path: Path) -> None:
    """A container's processes may have millions open, for which a look has no time."""
    most, more, _, _ = FILES_OF_TURN
    with (
        cgroup_of("many") as many,
        cgroup_of("few") as few,
        with_files(tmp_path, more, many) as largest,
        with_files(tmp_path, most, many) as first,
        with_files(tmp_path, most, many) as second,
        with_files(tmp_path, most, few) as other,
        with_files(tmp_path, 0, few) as small,
    ):
        order = [pid for pid in scanned()[0] if pid in (largest, first, second, other, small)]
    assert order == [small, other, first, second, largest]


def test_whom_there_is_no_time_for_is_counted(tmp_path: Path) -> None:
    with cgroup_of("many") as many, with_files(tmp_path, FILES_OF_TURN[0], many):
        *uses, extent = scan(0, frozenset({MAJOR}), limit_s=0.0)
    assert uses == []
    assert isinstance(extent, Extent)
    ended = extent.processes - extent.late - extent.closed  # meanwhile
    assert 0 <= ended < extent.late
    assert path_in_proc(many) in extent.closed_in
    assert f"what {extent.late} of {extent.processes} processes have open, so many files" in extent.unread


CLOSED = scanned()[1].closed  # processes that this machine lets nobody look into
WITHOUT = ("setpriv", "--bounding-set", "-all", "--inh-caps", "-all")
UNSEEING: Mapping[str, tuple[Sequence[str], bool, bool]] = {  # whether it sees all, and whether into all
    "without capabilities": (WITHOUT, ON_THE_HOST, False),
    "with the drop-in's": (AS_DROP_IN, ON_THE_HOST, True),
    "in a pod without hostPID": (("unshare", "--pid", "--fork", "--mount-proc"), False, True),
    "behind ProtectProc": (
        ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=ptraceable p /proc; exec "$@"', "sh", *WITHOUT),
        False,
        True,  # what cannot be looked into is not even listed
    ),
}


@pytest.mark.parametrize(("before", "whole", "into_all"), UNSEEING.values(), ids=UNSEEING.keys())
def test_a_look_tells_how_far_it_reaches(before: Sequence[str], whole: bool, into_all: bool) -> None:
    _, extent = scanned(*before)
    assert (extent.whole, extent.closed <= CLOSED) == (whole, into_all)
    assert extent.closed_in or into_all


async def test_a_look_takes_a_child_of_its_own(tmp_path: Path) -> None:
    """It leaves out what we hold through children, as the holder here is."""
    with holding(tmp_path, FULL) as process:
        found = await look(MAJORS)
    assert process.pid not in {use.pid for use in found.uses}
    assert found.extent.whole is ON_THE_HOST


async def test_a_look_that_takes_too_long_is_ended() -> None:
    with pytest.raises(LookError, match="took longer than 0 s, and was stopped"):
        await look(MAJORS, limit_s=0.001)
