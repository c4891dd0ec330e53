"""What becomes of containers when GPUs fail, shown on a real containerd and a simulated node.

A GPU dies under a container, which is stopped and restarted in place onto another GPU; the dead one is refused, comes
back and is granted again; MIG devices are made, and the driver is swapped. `nri-gpu status --watch` runs alongside.
"""

import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

from tests.demo import show
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, Pod
from tests.support.daemon import ENVIRONMENT, FOUR_GPUS, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.loading import LIBRARIES
from tests.support.waiting import wait_for

OLD, NEW = "580.95.05", "590.10"
PATIENCE_S: Final = 20.0
POLICY: Final = """schema = 1
[health]
containers = "stop"
hold_down_s = 4 # much too short for a real node
reprobe_s = 1
[guard]
cri_socket = "{cri}"
stop_grace_s = 0
"""
LOST: Final = 'unavailable = "GPU is lost"\nsigns = ["lost"]\n'
CUT: Final = """
mig = [{ uuid = "MIG-21bad080-0000-5000-8000-090000000000", profile = "1g.10gb", gi = 9, ci = 0 }]
"""


class SimulatedNode:
    """A folder with the node's file, which is edited as things happen, and with two drivers."""

    def __init__(self, base: Path) -> None:
        base.mkdir()
        self.base, self.node = base, base / "node.toml"
        self._text = FOUR_GPUS.read_text()
        self._shown: dict[int, str] = {}
        self._write()
        for version in (OLD, NEW):
            make_driver_root(base / version, version)
        self.install(OLD)

    def install(self, version: str) -> None:
        """As a driver's installer: from now on its files are found."""
        fresh = self.base / "fresh"
        fresh.symlink_to(version)
        fresh.rename(self.base / "driver")

    def shows(self, number: int, keys: str) -> None:
        """From now on a GPU has these keys, and none from before."""
        self._shown[number] = keys
        self._write()

    def unload(self) -> None:
        """Nobody can be asked from now on."""
        self.node.unlink()

    def load(self, changed: Mapping[str, str]) -> None:
        """The driver answers again, with other words in the file."""
        for old, new in changed.items():
            self._text = self._text.replace(old, new)
        self._write()

    def _write(self) -> None:
        head, *gpus = self._text.split("[[gpu]]\n")
        whole = (f"[[gpu]]\n{self._shown.get(number, '')}{gpu}" for number, gpu in enumerate(gpus))
        fresh = self.base / "node.fresh"
        fresh.write_text("".join((head, *whole)))
        fresh.rename(self.node)


class Alongside:
    """`nri-gpu status --watch`, whose lines are shown as they come."""

    def __init__(self, stack: ExitStack, daemon: NriGpu) -> None:
        command = [sys.executable, "-m", "nri_gpu", "status", "--watch", "--state-dir", str(daemon.launch.state)]
        path = daemon.launch.base / "watch"
        output: IO[bytes] = stack.enter_context(path.open("wb"))
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdout=output, stderr=output, env=ENVIRONMENT, cwd="/"
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        self._path = path
        self._shown = 0

    def show(self, *words: str) -> None:
        """What it said since the last time, once that holds each of these."""
        wait_for(f"--watch to say {words}", lambda: all(word in self._new() for word in words), PATIENCE_S, self._new)
        said = self._new()
        show.lines("status --watch", said.splitlines())
        self._shown += len(said)

    def _new(self) -> str:
        whole, newline, _ = self._path.read_text()[self._shown :].rpartition("\n")
        return whole + newline


def main() -> int:
    """Run it. Returns an exit code."""
    return show.run("make demo-faults", demonstrate)


def demonstrate(stack: ExitStack) -> None:
    """Boot, and let things happen."""
    runtime = packages.find_any()
    show.step(f"containerd {runtime.release} on private paths; four simulated GPUs")
    node = stack.enter_context(Containerd(runtime))
    simulated = SimulatedNode(node.base / "demo")
    policy = simulated.base / "policy.toml"
    policy.write_text(POLICY.format(cri=node.cri_socket))
    launch = Launch(
        simulated.base / "run", node.nri_socket, simulated.node, simulated.base / "driver", policy, log_level="INFO"
    )
    daemon = stack.enter_context(NriGpu(launch))
    daemon.wait_ready()
    watching = Alongside(stack, daemon)
    watching.show("GPU  MODEL")
    dead, other = _a_gpu_dies(node, simulated, daemon, watching)
    _it_comes_back(node, simulated, watching, dead)
    _mig(node, simulated, watching, max({0, 1, 2, 3} - {dead, other}))
    _driver(node, simulated, daemon, watching)
    show.step("What `nri-gpu status` says in the end")
    show.lines("", daemon.verb("status").stdout.splitlines())
    show.step("Cleaning up")


def _a_gpu_dies(node: Containerd, simulated: SimulatedNode, daemon: NriGpu, watching: Alongside) -> tuple[int, int]:
    """Returns the numbers of the GPU and of the one that took its place."""
    show.step("Pod train asks for one GPU")
    pod = node.cri.asking("count=1", "train")
    first = node.cri.run(pod)
    number = _gpu_of(node, first)
    show.lines("pod train", [f"runs, and has /dev/nvidia{number}"])
    show.step(f"GPU {number} is lost")
    simulated.shows(number, LOST)
    watching.show(f"GPU {number} ", "is bad, because of: GPU is lost")
    wait_for("the container to end", lambda: node.cri.status(first).state == "EXITED", PATIENCE_S)
    line = daemon.wait_logged("container stopped")
    show.lines("log", [line.partition(" ")[2].strip()])
    show.step("The kubelet restarts it in the same pod")
    node.cri.remove(first)
    other = _gpu_of(node, node.cri.run(pod))
    show.lines("pod train", [f"runs, and has /dev/nvidia{other}" if other != number else "THE SAME: must never happen"])
    show.step(f"Whoever wants GPU {number} and no other has to wait")
    show.refused(node, f"device={number}")
    return number, other


def _it_comes_back(node: Containerd, simulated: SimulatedNode, watching: Alongside, number: int) -> None:
    show.step(f"GPU {number} is back, and granted again after 4 s without trouble")
    simulated.shows(number, "")
    watching.show("is recovering", "is healthy, recovered from: GPU is lost")
    patient = node.cri.run_asking(f"device={number}", "patient")
    show.lines("pod patient", [f"runs, and has /dev/nvidia{_gpu_of(node, patient)}"])


def _mig(node: Containerd, simulated: SimulatedNode, watching: Alongside, number: int) -> None:
    show.step(f"GPU {number} is cut into MIG devices")
    show.refused(node, "mig=1g.10gb")
    simulated.shows(number, CUT)
    watching.show(f"GPU {number} (", "mig_enabled False -> True", "1g.10gb", "is new")
    _look(node, node.cri.asking("mig=1g.10gb", "slice"), "slice")


def _driver(node: Containerd, simulated: SimulatedNode, daemon: NriGpu, watching: Alongside) -> None:
    show.step(f"The driver {OLD} is unloaded: nobody can be asked, and the last snapshot serves")
    simulated.unload()
    watching.show("not refreshed: ")
    late = node.cri.asking("count=1", "late")
    _look(node, late, "late")
    node.cri.remove_pod(late.id)
    show.step(f"{NEW} is installed and loaded, with another major for nvidia-uvm")
    simulated.install(NEW)
    simulated.load(
        {OLD: NEW, 'cuda = "13.0"': 'cuda = "13.1"', "uvm = 1510": "uvm = 1520", "caps = 1511": "caps = 1521"}
    )
    watching.show(f"driver_version {OLD} -> {NEW}", "nvidia_uvm 1510 -> 1520", "the driver answers again")
    wait_for("its files", lambda: _staged(daemon, NEW), PATIENCE_S, daemon.log)
    _look(node, node.cri.asking("count=1", "new"), "new")


def _staged(daemon: NriGpu, version: str) -> bool:
    lines = daemon.log().splitlines()
    return any("driver files staged" in line and f"driver_version={version}" in line for line in lines)


def _gpu_of(node: Containerd, container: ContainerId) -> int:
    """N of the one /dev/nvidiaN that it has."""
    found = node.cri.execute(container, "/bin/sh", "-c", "cd /dev; ls -d nvidia[0-9]*").stdout.split()
    (name,) = found
    return int(name.removeprefix("nvidia"))


def _look(node: Containerd, pod: Pod, name: str) -> None:
    """What a container of that pod has of the driver."""
    container = node.cri.run(pod)
    nodes = node.cri.execute(container, "/bin/sh", "-c", "ls -l /dev | grep nvidia").stdout.splitlines()
    libraries = node.cri.execute(container, "/bin/ls", LIBRARIES).stdout.split()
    show.lines(f"pod {name}", [*nodes, " ".join(each for each in libraries if each.startswith("libcuda.so"))])


if __name__ == "__main__":
    sys.exit(main())
