"""Whatever the node shows of itself: `doctor` ends with findings, `prepare` with a plan, a process is who it is.

A file by its name, and its content: others' configuration, which `doctor` reads, with the parts that read it; the
driver's files, of which `prepare` makes device nodes. name: a program's own name, any 15 bytes, in the files of /proc.
machine: the firmware's name of the machine, of which a label is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from nri_gpu.doctor.component_checks import other_findings
from nri_gpu.doctor.driver_checks import driver_findings
from nri_gpu.doctor.kubelet_checks import kubelet_findings
from nri_gpu.doctor.programs import running
from nri_gpu.doctor.runtime_checks import runtime_findings
from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.domain.bounds import GPU_INDEX_MAX
from nri_gpu.domain.finding import Finding
from nri_gpu.host.actions import MakeNode, make_plan
from nri_gpu.host.facts import look
from nri_gpu.kubelet.node_labels import VALUE_MAX, machine_name, value_of
from nri_gpu.system.proc import Stat, parse_cgroups, parse_stat
from nri_gpu.system.process import Process, process_of, user_of
from tests.fuzz.target import Target, chosen, named, scratch
from tests.unit.doctor.node import DoctorNode
from tests.unit.host.host_tree import NVIDIA, host_below, information, params

NODE: Final = DoctorNode(host_below(scratch()), ExitStack())
RUNTIME: Final = container_runtime(NODE.seen)
CHECKPOINT: Final = "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
GPU: Final = "proc/driver/nvidia/gpus/0000:18:00.0/information"
NAME_MAX: Final = 15  # bytes of a program's name (Linux: TASK_COMM_LEN)
LABEL: Final = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)?")  # Kubernetes: validation.LabelValue
NODE.listen("var/lib/kubelet/device-plugins/kubelet.sock")


@contextmanager
def _holding(file: str, data: bytes) -> Iterator[None]:
    """The node's file has this content meanwhile."""
    path = NODE.root / file
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    try:
        yield
    finally:
        path.unlink() if before is None else path.write_bytes(before)


def _examined(file: str, part: Callable[[], Iterator[Finding]], data: bytes) -> bool:
    """Whether nothing is wrong with the node that has this file."""
    with _holding(file, data):
        found = list(part())
    assert found
    assert all(each.subject and each.meaning for each in found)
    return not any(each.fix for each in found)


PARTS: Final[dict[str, Callable[[], Iterator[Finding]]]] = {
    CHECKPOINT: lambda: kubelet_findings(NODE.seen, RUNTIME),
    "var/lib/kubelet/config.yaml": lambda: kubelet_findings(NODE.seen, RUNTIME),
    "etc/docker/daemon.json": lambda: other_findings(NODE.seen, RUNTIME),
    "etc/containerd/config.toml": lambda: runtime_findings(NODE.seen, container_runtime(NODE.seen)),
    "proc/700/cmdline": lambda: runtime_findings(NODE.seen, container_runtime(NODE.seen)),
    "proc/sys/kernel/osrelease": lambda: driver_findings(NODE.seen),
    "sys/module/nvidia/version": lambda: driver_findings(NODE.seen),
}


def _planned(file: str, data: bytes) -> bool:
    """Whether all of the driver's files are understood."""
    with _holding(file, data):
        plan = make_plan(look(NODE.tree.places))
    for action in plan.actions:
        if isinstance(action, MakeNode):
            assert action.node.number[0] > 0
            assert 0 <= action.node.number[1] <= GPU_INDEX_MAX or action.node.number[0] != NVIDIA
            assert not action.node.mode & ~0o666
            assert "/" not in str(action.path).removeprefix("nvidia-caps/")
    return not plan.findings


def name(data: bytes) -> bool:
    """A process is told by its files, whatever it calls itself: the kernel escapes no more than this."""
    comm = data.replace(b"\0", b"")[:NAME_MAX]
    proc = NODE.root / "proc"
    fields = b"S 700 " + b"0 " * 17 + b"4242 0 0\n"
    NODE.process(900, "x", "x")
    (proc / "900/comm").write_bytes(comm + b"\n")
    (proc / "900/stat").write_bytes(b"900 (" + comm + b") " + fields)
    escaped = comm.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
    (proc / "900/status").write_bytes(b"Name:\t" + escaped + b"\nUid:\t1000\t1001\t1002\t1003\nNSpid:\t900\t1\n")
    assert process_of(900, proc) == Process(900, 4242)
    assert user_of(900, proc) == 1001
    assert parse_stat((proc / "900/stat").read_text(errors="replace")) == Stat("S", 700, 0, 4242)
    assert not list(running(proc, {comm.decode(errors="replace").strip()} - {"containerd", "kthreadd"}))
    return bool(comm.strip())


def cgroups(data: bytes) -> bool:
    """A cgroup's path is its maker's: no line feed is in it."""
    path = b"/" + data.replace(b"\n", b"").replace(b"\0", b"")
    text = (b"4:memory:" + path + b"\n0::" + path + b"\n").decode(errors="replace")
    found = parse_cgroups(text)
    assert len(found) <= 1
    return bool(found)


def machine(data: bytes) -> bool:
    file = NODE.root / "product_name"
    file.write_bytes(data)
    value = value_of(machine_name(file))
    assert LABEL.fullmatch(value)
    assert len(value) <= VALUE_MAX
    return bool(value)


READERS: Final[dict[str, Callable[[bytes], object]]] = {
    **{file: partial(_examined, file, part) for file, part in PARTS.items()},
    **{file: partial(_planned, file) for file in (GPU, "proc/driver/nvidia/params", "proc/devices")},
    "name": name,
    "cgroups": cgroups,
    "machine": machine,
}
TARGET: Final = Target(
    chosen(READERS),
    good=[
        *named(CHECKPOINT, '{"Data": {"RegisteredDevices": {"nvidia.com/gpu": ["GPU-1", "GPU-2"]}}, "Checksum": 1}'),
        *named("etc/docker/daemon.json", '{"default-runtime": "runc"}'),
        *named("etc/containerd/config.toml", (NODE.root / "etc/containerd/config.toml").read_bytes()),
        *named("proc/700/cmdline", "/usr/bin/containerd\0--config\0/etc/containerd/config.toml\0"),
        *named("proc/driver/nvidia/params", params()),
        *named(GPU, information(0)),
        *named("name", "python3", ") Z 1 2 3", "\x1cUid: 0 0 0 0", b"\xff\xfe", "a\nb"),
        *named("cgroups", "kubepods/pod1/abc", b"\x1c0::/"),
        *named("machine", "PowerEdge R750xa\n"),
    ],
    bad=[
        *(each for file in (CHECKPOINT,) for each in named(file, b"\xff", "{", "[" * 2500)),
        *named("etc/docker/daemon.json", '{"default-runtime": "nvidia"}'),
        *named(
            "etc/containerd/config.toml", "\xff", "version = 3\n[plugins.'io.containerd.nri.v1.nri']\ndisable = true\n"
        ),
        *named("proc/driver/nvidia/params", "DeviceFileMode: 660\n", "DeviceFileUID: -1\n"),
        *named(GPU, "Device Minor: 08\n", "Device Minor: 999\n", "Device Minor: 1\n"),
        *named("name", ""),
        *named("machine", "", "\xff", "---"),
    ],
    pieces=(
        *READERS,
        *("RegisteredDevices", "Data", "default-runtime", "nvidia", "cgroupDriver: ", "systemd", "imports = ['*']"),
        *("--config", "--root", "\0", "[plugins.'io.containerd.nri.v1.nri']", "disable = true", "9" * 5000, "[" * 2500),
        *("Device Minor: ", "GPU Excluded: Yes", "DeviceFileMode: ", "ModifyDeviceFiles: 0", "511 nvidia", "Uid:", ")"),
        *("\x1c", "\x85", "\u2028", "\xff", "../", "580.95.05"),
    ),
    bytes_max=4000,
)
TARGETS: Final = {"node": TARGET}
