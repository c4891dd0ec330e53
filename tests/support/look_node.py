"""A made-up node for the observer's look: bundles as containerd 2.x writes them, and real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.cgroup import Cgroup, host_cgroup

NVIDIA: Final = 195
STAYS: Final = """\
import os, sys
for index in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        sys.stdin.read()
        os._exit(0)
    print(pid)
print(flush=True)
sys.stdin.read()
"""


def spec(name: str, *minors: int, **fields: object) -> Mapping[str, Any]:
    """A spec of a container in a pod, of a usual size. minors: of its GPUs. fields: more of it, or in its place."""
    allowed = [(1, minor) for minor in (3, 5, 7, 8, 9)] + [(5, 0), (5, 1), (5, 2)]
    rules: list[dict[str, object]] = [{"allow": False, "access": "rwm"}]
    rules += [{"allow": True, "type": "c", "major": a, "minor": b, "access": "rwm"} for a, b in allowed]
    nodes = [
        {
            "path": f"/dev/nvidia{minor}",
            "type": "c",
            "major": NVIDIA,
            "minor": minor,
            "fileMode": 438,
            "uid": 0,
            "gid": 0,
        }
        for minor in minors
    ]
    rules += [{"allow": True, "type": "c", "major": NVIDIA, "minor": each["minor"], "access": "rw"} for each in nodes]
    mounts = [
        {"destination": f"/place/{at}", "source": f"/var/lib/kubelet/pods/x/{at}", "options": ["ro"]}
        for at in range(20)
    ]
    syscalls = [{"names": [f"call{at}" for at in range(400)], "action": "SCMP_ACT_ALLOW", "args": []}]
    return {
        "ociVersion": "1.2.0",
        "process": {"args": ["/bin/serve"], "env": [f"VARIABLE_{at}=value of {at}" for at in range(40)], "cwd": "/"},
        "mounts": mounts,
        "annotations": {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": "main",
            "io.kubernetes.cri.sandbox-id": f"sandbox-{name}",
            "io.kubernetes.cri.sandbox-name": name,
            "io.kubernetes.cri.sandbox-namespace": "research",
            "io.kubernetes.cri.sandbox-uid": f"uid-{name}",
        },
        "linux": {"resources": {"devices": rules}, "devices": nodes, "seccomp": {"syscalls": syscalls}},
        **fields,
    }


def write_bundle(tasks: Path, id_: str, content: object, pid: int, namespace: str = "k8s.io") -> Path:
    """A bundle in a folder of containerd's."""
    bundle = tasks / namespace / id_
    bundle.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps(content))
    (bundle / "init.pid").write_text(str(pid))
    return bundle


@contextmanager
def processes(count: int) -> Iterator[Sequence[int]]:
    """So many processes that sleep."""
    command = [sys.executable, "-I", "-S", "-c", STAYS, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin
        assert child.stdout
        pids = [int(line) for line in iter(child.stdout.readline, "\n")]
        try:
            yield pids
        finally:
            child.stdin.close()


@contextmanager
def device_cgroups(names: Mapping[str, int]) -> Iterator[None]:
    """Cgroups of these names in the hierarchy that filters devices, each with a process. They go with the processes."""
    hierarchy = Path("/sys/fs/cgroup") / ("devices" if host_cgroup() is Cgroup.V1 else "")
    top = Path(tempfile.mkdtemp(prefix="nri-gpu-test-", dir=hierarchy))
    try:
        for name, pid in names.items():
            (top / name).mkdir()
            (top / name / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for name, pid in names.items():
            (hierarchy / "cgroup.procs").write_text(str(pid))
            (top / name).rmdir()
        top.rmdir()
