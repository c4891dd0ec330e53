"""The main job, shown: a node with four GPUs, three containers that share them, and two that get none.

Everything is private to this run (a containerd of its own, in a temporary folder) and is gone afterwards. Where this
machine has NVIDIA GPUs they are used; elsewhere a topology file stands in for NVML, and a made-up driver root for the
driver. All the rest is real: containerd, runc, the kernel's device cgroup.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.cli.page import Tone
from tests.demo import show
from tests.support import packages
from tests.support.cgroup import Cgroup, device_rules
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import FOUR_GPUS, READY_S, TOPOLOGIES, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.loading import LIBRARIES
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

# What a CUDA image brings along: everywhere else it hands over every GPU of the node.
BAKED_IN: Final = {"NVIDIA_VISIBLE_DEVICES": "all"}
NVIDIA_MAJOR: Final = 195
ROOT: Final = TOPOLOGIES.parents[1]


class Asking(Struct, frozen=True):
    """One pod of the picture. wants: GPU numbers; None leaves the annotation out."""

    name: str
    wants: tuple[int, ...] | None

    @property
    def annotations(self) -> dict[str, str]:
        if self.wants is None:
            return {}
        return {"gpu.nri.io/container.main": f"device={','.join(map(str, self.wants))}; mode=shared"}


PICTURE: Final = (Asking("a", (0, 1)), Asking("b", (0, 2, 3)), Asking("c", (3,)))


def main() -> int:
    """Run it. Returns an exit code."""
    return show.run("make demo", demonstrate)


def demonstrate(stack: ExitStack) -> None:
    """Boot, ask, look, clean up."""
    runtime = packages.find_any()
    show.step(f"containerd {runtime.release} on private paths; what it writes goes with this demo")
    node = stack.enter_context(Containerd(runtime))
    # Below containerd's own folder, which goes even when this program is killed.
    launch = _launch(node)
    show.step(f"nri-gpu run {' '.join(launch.arguments()[:4])} ...".replace(f"{ROOT}/", ""))
    daemon = stack.enter_context(NriGpu(launch))
    daemon.wait_ready()
    gpus = show.gpus(daemon)
    picture = [_fitted(asking, gpus) for asking in PICTURE]
    show.step("Three pods ask by annotation, one does not; each image says NVIDIA_VISIBLE_DEVICES=all")
    for asking in (*picture, Asking("d", None)):
        container = _run(node, asking)
        _look(node, asking, container)
        if asking.wants is None:
            _attack(node, container)
    _refused(node, picture)
    wait_for("the ledger", lambda: len(_grants(daemon)) == len(picture), READY_S)
    show.step("Who holds which GPU")
    show.status(daemon)
    show.step("Killed with -9 and started again: it reads the signed grants back from the containers")
    before = _grants(daemon)
    daemon.kill()
    daemon.start()
    daemon.wait_ready()
    wait_for("the ledger", lambda: _grants(daemon) == before, READY_S)
    show.lines("grants", [f"the same {len(before)} as before"], Tone.GOOD)
    show.step("Cleaning up")


def _grants(daemon: NriGpu) -> dict[str, tuple[str, ...]]:
    return {grant["container_id"]: tuple(grant["gpu_uuids"]) for grant in daemon.ledger()["grants"]}


def _launch(node: Containerd) -> Launch:
    folder = node.base / "demo"
    folder.mkdir()
    launch = Launch(folder, node.nri_socket, topology=None, environment={"NODE_NAME": "demo"}, log_level="INFO")
    if not _has_gpus():
        launch = replace(launch, topology=FOUR_GPUS, driver_root=make_driver_root(folder / "driver"))
    return launch.with_policy(f'schema = 1\n[guard]\ncri_socket = "{node.cri_socket}"\n')


def _has_gpus() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _fitted(asking: Asking, gpus: Sequence[str]) -> Asking:
    """On a machine with fewer than four GPUs, as much of the picture as fits."""
    wants = tuple(number for number in asking.wants or () if number < len(gpus))
    return Asking(asking.name, wants or (0,))


def _run(node: Containerd, asking: Asking) -> ContainerId:
    pod = node.cri.run_pod(PodSpec(name=asking.name, annotations=asking.annotations))
    return node.cri.run(pod, ContainerSpec(env=BAKED_IN))


def _look(node: Containerd, asking: Asking, container: ContainerId) -> None:
    status = node.cri.status(container)
    show.container(asking.name, asking.annotations)
    found = node.cri.execute(container, "/bin/sh", "-c", "ls /dev | grep nvidia").stdout.split()
    show.lines("ls /dev | grep nvidia", [" ".join(found) or "(no GPU)"])
    if node.cgroup is Cgroup.V1:
        rules = sorted(
            f"c {rule.major}:{rule.minor} {rule.access}"
            for rule in device_rules(node.container_cgroup(container))
            if rule.kind == "c" and rule.major is not None and rule.major >= NVIDIA_MAJOR
        )
        show.lines("device cgroup allows", [", ".join(rules) or "(no GPU)"])
    show.lines("NVIDIA_VISIBLE_DEVICES", [status.env.get("NVIDIA_VISIBLE_DEVICES", "")])
    hooks = status.oci.get("hooks") or {}
    show.lines("OCI hooks", [str(hooks) if hooks else "none"])
    if asking.wants is not None:
        libraries = node.cri.execute(container, "/bin/ls", LIBRARIES).stdout.split()
        shown = [name for name in libraries if name.startswith("libcuda.so")]
        show.lines("driver libraries", [f"{' '.join(shown)} and {len(libraries) - len(shown)} more"])
        smi = node.cri.execute(container, "/bin/sh", "-c", "nvidia-smi 2>&1 || true").stdout
        show.lines("nvidia-smi", smi.splitlines()[: 12 if _has_gpus() else 1])  # the made-up one lists /dev below


def _attack(node: Containerd, container: ContainerId) -> None:
    script = f"mknod /dev/mine c {NVIDIA_MAJOR} 0 && cat /dev/mine"
    done = node.cri.execute(container, "/bin/sh", "-c", script)
    said = (done.stderr or done.stdout).strip()
    show.lines("mknod c 195 0, open", [said or "OPENED: that must never happen"], Tone.GOOD if said else Tone.BAD)


def _refused(node: Containerd, picture: Sequence[Asking]) -> None:
    show.step("What cannot be granted is refused, in words that `kubectl describe pod` shows")
    wanted = picture[0].wants or (0,)
    for value in (f"device={wanted[0]}; mode=exclusive", "count=9", "device=0,two"):
        show.refused(node, value)


if __name__ == "__main__":
    sys.exit(main())
