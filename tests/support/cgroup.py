"""A container's processes, and the devices that its cgroup lets them open: on v1 rules, on v2 an eBPF program."""

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from nri_gpu.system.cgroups import hierarchies, mounts_of
from nri_gpu.system.process import process_of
from nri_gpu.verify.in_kernel import DeviceRule
from tests.support import packages


class Cgroup(StrEnum):
    """The cgroup generation that a containerd sees at /sys/fs/cgroup."""

    V1 = "v1"
    V2 = "v2"


class OccupiedCgroup:
    """A cgroup of a name that a runtime would give it, and a process in one below it.

    process: by default one that sleeps.
    Raises: KeyError: the controller's hierarchy is not here; OSError: it cannot be made.
    """

    def __init__(self, controller: str, name: str, process: subprocess.Popen[str] | None = None) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="nri-gpu-test-", dir=hierarchies(mounts_of("self"))[controller]))
        self.own = self.top / name
        (self.own / "inner").mkdir(parents=True)
        self.process = process or subprocess.Popen(["sleep", "600"], text=True)
        self.move(self.own / "inner")

    def move(self, cgroup: Path) -> None:
        """Move the process."""
        (cgroup / "cgroup.procs").write_text(str(self.process.pid))

    def end(self) -> None:
        """End the process; the cgroups stay."""
        self.process.kill()
        self.process.wait()

    def remove(self) -> None:
        self.end()
        if self.top.exists():
            remove_cgroup(self.top)


def remove_cgroup(cgroup: Path) -> None:
    """Remove a cgroup and all below it, however deep: os.walk nests a call for each level."""
    folders = [cgroup]
    for each in folders:
        folders += (Path(entry) for entry in os.scandir(each) if entry.is_dir(follow_symlinks=False))
    for each in reversed(folders):
        each.rmdir()


def host_cgroup() -> Cgroup:
    """What this machine has. v1 can show v2 to a containerd in a mount namespace; not the other way round."""
    return Cgroup.V2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else Cgroup.V1


def processes(cgroup: Path) -> list[int]:
    """Those in it; none where it is gone."""
    with suppress(FileNotFoundError):
        return [pid for pid in map(int, (cgroup / "cgroup.procs").read_text().split()) if process_of(pid)]
    return []


class Freezer:
    """A cgroup of v1 in which processes freeze: until they thaw, SIGKILL does not end them, as in a driver that hangs.

    joining: a line of a shell script, which moves its process there.
    Raises: OSError: there is no such hierarchy here, or it is not ours.
    """

    def __init__(self) -> None:
        self.folder = Path("/sys/fs/cgroup/freezer") / f"nri-gpu-test-frozen-{os.getpid()}"
        self.folder.mkdir()
        self.joining = f"echo $$ > {self.folder}/cgroup.procs\n"

    @property
    def pids(self) -> list[int]:
        return processes(self.folder)

    def hold(self, pid: int) -> None:
        """Freeze a process that runs."""
        (self.folder / "cgroup.procs").write_text(str(pid))
        self.freeze()

    def freeze(self) -> None:
        (self.folder / "freezer.state").write_text("FROZEN")

    def thaw(self) -> None:
        (self.folder / "freezer.state").write_text("THAWED")


def end_processes(cgroup: Path, freezer: Path) -> None:
    """Kill them all, and thaw them. freezer: the same cgroup in the hierarchy that freezes it."""
    for pid in processes(cgroup):
        with suppress(ProcessLookupError):  # their shim kills the others
            os.kill(pid, signal.SIGKILL)
    for file, thawed in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        if (freezer / file).exists():
            (freezer / file).write_text(thawed)


def device_rules(cgroup: Path) -> frozenset[DeviceRule]:
    """What a v1 devices cgroup allows."""
    return frozenset(DeviceRule.parse(line) for line in (cgroup / "devices.list").read_text().splitlines())


def device_programs(cgroup: Path) -> tuple[int, ...]:
    """Ids of the eBPF programs that filter a v2 cgroup's devices. None: everything may be opened."""
    shown = subprocess.run(
        [*packages.command("bpftool"), "--json", "cgroup", "show", cgroup], capture_output=True, text=True, check=True
    ).stdout
    # bpftool of newer kernels says "cgroup_device", older ones "device"; nothing attached is an empty text.
    attached = json.loads(shown or "[]")
    return tuple(program["id"] for program in attached if program["attach_type"].endswith("device"))
