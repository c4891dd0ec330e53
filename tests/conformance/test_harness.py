"""The harness itself: a real containerd boots, runs containers, guards devices, and leaves nothing behind."""

import json
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import cleanup, packages, stale
from tests.support.cgroup import Cgroup, DeviceRule, device_programs, device_rules
from tests.support.cleanup import Leftovers
from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.errors import HarnessError
from tests.support.glibc import glibc_files
from tests.support.image import Entry, File, ImageSpec, Link
from tests.support.keeping import PROJECT
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.probe import Opened, device_nodes, open_number, open_path
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

NOTHING = Leftovers((), (), ())
DEADLINE_S = 20.0
# An owner with one container, which tells where and then never ends by itself.
OWNER = """
import sys, time
from tests.support import packages
from tests.support.cgroup import Cgroup
from tests.support.containerd import Containerd
node = Containerd(packages.fetch(packages.Version(sys.argv[1])), cgroup=Cgroup(sys.argv[2]))
node.boot()
container = node.cri.run(node.cri.run_pod())
print(node.base, node.pid, node.cri.status(container).pid, flush=True)
time.sleep(600)
"""


def test_a_container_runs_and_describes_itself(node: Containerd) -> None:
    pod = node.cri.run_pod(PodSpec(annotations={"a.example/key": "value"}))
    container = node.cri.run(pod, ContainerSpec(env={"GREETING": "hello"}, memory_bytes=64 << 20))

    said = node.cri.execute(container, "/bin/sh", "-c", "echo $GREETING; echo oh >&2; exit 7")
    status = node.cri.status(container)

    assert (said.code, said.stdout, said.stderr) == (7, "hello\n", "oh\n")
    assert (status.state, status.env["GREETING"], status.device_paths) == ("RUNNING", "hello", [])
    assert status.oci["linux"]["resources"]["memory"]["limit"] == 64 << 20
    assert Path(f"/proc/{status.pid}").exists()
    assert node.nri_socket.is_socket()


def test_a_container_with_a_hook_is_noticed(fresh_node: Containerd) -> None:
    edits = {"hooks": [{"hookName": "createRuntime", "path": "/bin/true", "args": ["true"]}]}
    device = {"name": "0", "containerEdits": edits}
    (fresh_node.layout.cdi / "hook.json").write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "example.com/hook", "devices": [device]})
    )
    fresh_node.cri.run(fresh_node.cri.run_pod(), ContainerSpec(cdi_devices=("example.com/hook=0",)))
    with pytest.raises(HarnessError, match=r"containers had hooks: .*/bin/true"):
        fresh_node.cri.remove_all()
    assert fresh_node.cri.containers() == []


def test_runtimes_errors_keep_their_code(node: Containerd) -> None:
    pod = node.cri.run_pod()
    with pytest.raises(CriError, match="nri-gpu/unknown") as caught:
        node.cri.create(pod, ContainerSpec(image="localhost/nri-gpu/unknown:1"))
    assert caught.value.code == "NOT_FOUND"


def test_an_image_brings_environment_and_host_programs(node: Containerd) -> None:
    files: dict[str, Entry] = {"/data/note": File(b"read me"), "/data/link": Link("note")}
    extra = files | glibc_files({"/opt/cat": Path("/bin/cat")})
    node.import_image(ImageSpec("localhost/nri-gpu/baked:1", {"NVIDIA_VISIBLE_DEVICES": "all"}, extra=extra))
    container = node.cri.run(node.cri.run_pod(), ContainerSpec(image="localhost/nri-gpu/baked:1"))

    assert node.cri.execute(container, "/opt/cat", "/data/link").stdout == "read me"
    assert node.cri.status(container).env["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_many_containers_at_once(node: Containerd) -> None:
    with ThreadPoolExecutor(8) as pool:
        pods = list(pool.map(lambda n: node.cri.run_pod(PodSpec(name=f"pod-{n}")), range(8)))
        containers = list(pool.map(node.cri.run, pods))

    assert {each.id for each in node.cri.containers()} == set(containers)


def test_the_device_cgroup_stops_a_node_the_container_makes_itself(cgroup_node: Containerd, tmp_path: Path) -> None:
    cri, major = cgroup_node.cri, _unused_major()
    host_node = tmp_path / "gpu2"
    os.mknod(host_node, stat.S_IFCHR | 0o600, os.makedev(major, 2))
    pod = cri.run_pod()
    without = cri.run(pod, ContainerSpec("without"))
    with_device = cri.run(pod, ContainerSpec("with", devices={"/dev/gpu2": str(host_node)}))

    assert open_number(cri, without, major, 2) is Opened.DENIED
    assert open_number(cri, with_device, major, 2) is Opened.NO_DRIVER
    assert open_number(cri, with_device, major, 3) is Opened.DENIED
    assert open_path(cri, with_device, "/dev/gpu2") is Opened.NO_DRIVER
    assert open_path(cri, without, "/dev/null") is Opened.YES
    assert "/dev/gpu2" not in [each.path for each in device_nodes(cri, without)]
    [found] = [each for each in device_nodes(cri, with_device) if each.path == "/dev/gpu2"]
    assert (found.kind, found.major, found.minor) == ("c", major, 2)

    cgroup = cgroup_node.container_cgroup(with_device)
    if cgroup_node.cgroup is Cgroup.V1:
        assert DeviceRule("c", major, 2, "rwm") in device_rules(cgroup)
    else:
        assert device_programs(cgroup)


def test_a_privileged_container_may_open_everything(cgroup_node: Containerd) -> None:
    pod = cgroup_node.cri.run_pod(PodSpec(privileged=True))
    container = cgroup_node.cri.run(pod, ContainerSpec(privileged=True))
    assert open_number(cgroup_node.cri, container, _unused_major(), 2) is Opened.NO_DRIVER


@pytest.mark.parametrize("kill", [False, True], ids=["terminated", "killed"])
def test_containers_outlive_a_restart(fresh_node: Containerd, kill: bool) -> None:
    container = fresh_node.cri.run(fresh_node.cri.run_pod())
    before, daemon = fresh_node.cri.status(container).pid, fresh_node.pid

    fresh_node.restart(kill=kill)

    assert fresh_node.pid != daemon
    assert fresh_node.cri.status(container).pid == before
    assert fresh_node.cri.execute(container, "/bin/true").code == 0
    fresh_node.cri.remove_all()


def test_stop_leaves_nothing(runtime: packages.Runtime, cgroup: Cgroup) -> None:
    with Containerd(runtime, cgroup=cgroup, nri=False) as node:
        container = node.cri.run(node.cri.run_pod())
        pid, inside = node.cri.status(container).pid, node.leftovers()
        assert inside.processes
        assert inside.mounts
        assert inside.cgroups
        assert not node.nri_socket.exists()

    assert _left(node.base, pid) == NOTHING


def test_nothing_stays_when_the_owner_is_killed(runtime: packages.Runtime, cgroup: Cgroup) -> None:
    version = next(each for each in packages.VERSIONS if each.accepts.match(runtime.release))
    command = [sys.executable, "-c", OWNER, version, cgroup]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) as owner:
        assert owner.stdout
        base, *pids = owner.stdout.readline().split()
        owner.send_signal(signal.SIGKILL)

    wait_for("the keeper's work", lambda: not Path(base).exists(), DEADLINE_S)

    assert _left(Path(base), *map(int, pids)) == NOTHING


def test_the_next_run_sweeps_up_when_even_the_keeper_was_killed(runtime: packages.Runtime, cgroup: Cgroup) -> None:
    node = Containerd(runtime, cgroup=cgroup)
    node.boot()
    pid = node.cri.status(node.cri.run(node.cri.run_pod())).pid
    daemon = node.pid
    os.kill(node.keeper_pid, signal.SIGKILL)
    with pytest.raises(HarnessError, match="could not clean up"):
        node.abandon()

    stale.sweep()
    wait_for("the sweep, which another test worker may have begun", lambda: not node.base.exists(), DEADLINE_S)

    assert _left(node.base, pid, daemon) == NOTHING


def test_a_boot_that_fails_says_why_and_leaves_nothing(runtime: packages.Runtime) -> None:
    node = Containerd(runtime)
    node.layout.config.write_text("this is no configuration")
    with pytest.raises(HarnessError, match=r"ended at start.*\n.*toml"), node:
        pass
    assert _left(node.base) == NOTHING


def _left(base: Path, *pids: int) -> Leftovers:
    running = tuple(str(pid) for pid in pids if _runs(pid))
    return Leftovers(running, cleanup.mounts_below(base), cleanup.cgroups_named(base.name))


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _unused_major() -> int:
    """A character major without a driver, so that an allowed open ends in ENXIO."""
    used = {line.split()[0] for line in Path("/proc/devices").read_text().splitlines() if line[:3].strip().isdigit()}
    return next(major for major in range(60, 64) if str(major) not in used)  # 60-63 are for local use, devices.txt
