"""Two container runtimes on one node: the one with the NRI socket counts, and the other is never told to take it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.doctor.programs import running, shares_mounts
from nri_gpu.doctor.runtimes import ContainerRuntime, container_runtime
from nri_gpu.domain.finding import Finding, Level
from nri_gpu.system.sockets import file_at, file_of, listening
from tests.support.waiting import wait_for
from tests.unit.doctor.node import CONFIG, DOCKERS, K3S, DoctorNode, away


def k3s(node: DoctorNode, text: str = CONFIG) -> None:
    """k3s's containerd beside the node's own, which Docker's package brought."""
    node.write("etc/containerd/config.toml", DOCKERS)
    node.process(900, "containerd", "containerd", "-c", f"/{K3S}")
    node.write("proc/900/environ", "PATH=/usr/bin\0")
    node.write(K3S, text)


def replaced(node: DoctorNode) -> socket.socket:
    """The NRI socket after somebody has removed it and listens in its place."""
    node.remove("run/nri/nri.sock")
    return node.listen("run/nri/nri.sock")


def chosen(node: DoctorNode) -> ContainerRuntime:
    runtime = container_runtime(node.seen)
    assert runtime
    return runtime


def pid(node: DoctorNode) -> int:
    process = chosen(node).process
    return process.pid if process else 0


def second(node: DoctorNode) -> Finding:
    return next(each for each in node.examine().findings if each.subject == "second runtime")


def test_beside_dockers_the_one_with_the_socket(node: DoctorNode) -> None:
    k3s(node)
    shutil.rmtree(node.root / "proc/700/fd")
    node.opens(900, replaced(node))
    assert pid(node) == 900
    assert node.found(status=None) == {}
    assert second(node).level is Level.OK
    assert "pid 700, configured by /etc/containerd/config.toml, does not use /var/run/nri" in second(node).meaning


def test_of_two_that_listen_the_one_whose_file_is_there(node: DoctorNode) -> None:
    k3s(node)
    node.write("etc/containerd/config.toml", CONFIG)
    node.opens(900, replaced(node))
    assert (pid(node), chosen(node).certain) == (900, True)
    assert (second(node).level, "until the runtime above took it" in second(node).meaning) == (Level.ERROR, True)
    assert not any("systemctl" in line for line in second(node).fix)


def test_without_an_answer_of_the_kernel_both_are_named(node: DoctorNode) -> None:
    k3s(node)
    node.opens(900, replaced(node))
    node.remove("run/nri/nri.sock")
    node.write("run/nri/nri.sock", "")
    assert not chosen(node).certain
    found = {each.subject: each for each in node.examine(status=None).findings}
    told = found["container runtime"].meaning + found["second runtime"].meaning
    assert ("pid 700" in told, "pid 900" in told, "is not seen" in told) == (True, True, True)
    assert found["second runtime"].level is Level.ERROR
    assert "NRI" not in found
    assert not any("systemctl restart containerd" in line for each in found.values() for line in each.fix)


def test_where_no_socket_is_seen_the_version_that_the_daemon_names(node: DoctorNode) -> None:
    """As a user who may not look into /proc/PID/fd."""
    k3s(node)
    shutil.rmtree(node.root / "proc/700/fd")
    (node.root / "opt/bin").mkdir(parents=True)
    node.write("opt/bin/containerd", "#!/bin/sh\necho v2.2.1-k3s1\n").chmod(0o755)
    (node.root / "proc/900/exe").symlink_to("/opt/bin/containerd")
    for version, expected in (("2.2.1-k3s1", 900), ("2.1.9", 700), ("2.0.0", 900)):
        node.seen = replace(node.seen, status=node.status(connection=away(version=version)))
        assert pid(node) == expected, version


def test_else_the_one_with_cri_and_nri(node: DoctorNode) -> None:
    k3s(node)
    shutil.rmtree(node.root / "proc/700/fd")
    node.remove("run/nri/nri.sock")
    node.seen = replace(node.seen, status=None)
    assert pid(node) == 900
    assert node.found()["NRI"].fix == ("systemctl restart k3s    # containers go on running",)


def test_one_that_would_take_the_socket_is_a_warning(node: DoctorNode) -> None:
    k3s(node)
    node.write("etc/containerd/config.toml", CONFIG)
    shutil.rmtree(node.root / "proc/700/fd")
    node.opens(900, replaced(node))
    finding = node.only()
    assert (finding.level, "when it restarts" in finding.meaning) == (Level.WARNING, True)


def test_a_process_that_ends_while_it_is_read(node: DoctorNode) -> None:
    (node.root / "proc/700/fd/3").mkdir()  # readlink fails, as on a descriptor that was closed
    assert [path for path, _ in listening(node.root / "proc/700")] == ["/var/run/nri/nri.sock"]
    shutil.rmtree(node.root / "proc/700")
    assert list(listening(node.root / "proc/700")) == []


def test_whose_file_a_socket_is(node: DoctorNode) -> None:
    first = node.listen("run/a.sock")
    path = node.root / "run/a.sock"
    assert file_of(os.fstat(first.fileno()).st_ino) == file_at(path)
    path.unlink()
    assert file_at(path) is None
    assert file_of(os.fstat(node.listen("run/a.sock").fileno()).st_ino) == file_at(path)
    assert file_of(os.fstat(first.fileno()).st_ino) != file_at(path)
    assert file_of(1 << 40) is file_of(3) is None


def rootless(node: DoctorNode) -> None:
    """A user's containerd: it has no `-c`, and reads another file at the usual place."""
    node.write("etc/containerd/config.toml", CONFIG)
    node.process(900, "containerd", "containerd")


def namespace(node: DoctorNode, kind: str, **numbers: int) -> None:
    for process, number in numbers.items():
        folder = node.root / f"proc/{process.removeprefix('pid')}/ns"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / kind).symlink_to(f"{kind}:[{number}]")


@pytest.mark.parametrize("kind", ["user", "mnt"])
def test_a_users_own_containerd_is_no_second_runtime(node: DoctorNode, kind: str) -> None:
    rootless(node)
    assert second(node).level is Level.WARNING
    namespace(node, kind, pid1=1, pid700=1, pid900=2)
    assert not any(each.subject == "second runtime" for each in node.examine().findings)


def test_by_its_users_where_no_namespace_may_be_read(node: DoctorNode) -> None:
    rootless(node)
    for process, users in ((1, "0 0 4294967295"), (700, "0 0 4294967295"), (900, "0 1000 1\n1 100000 65536")):
        node.write(f"proc/{process}/uid_map", f"{users}\n")
    assert pid(node) == 700
    assert chosen(node).beside == ()


def test_a_runtime_with_mounts_of_its_own_counts_where_it_is_alone_or_a_unit(node: DoctorNode) -> None:
    """As by PrivateMounts=."""
    namespace(node, "mnt", pid1=1, pid700=2)
    assert pid(node) == 700
    rootless(node)
    namespace(node, "mnt", pid900=1)
    assert chosen(node).beside == ()
    node.write("proc/700/cgroup", "0::/system.slice/containerd.service\n")
    assert chosen(node).beside != ()


@pytest.mark.parametrize("state", ["Z (zombie)", "X (dead)"])
def test_a_process_that_has_ended_is_no_runtime(node: DoctorNode, state: str) -> None:
    rootless(node)
    node.write("proc/900/status", f"Name:\tcontainerd\nState:\t{state}\nNSpid:\t900\n")
    assert chosen(node).beside == ()
    node.write("proc/900/status", "Name:\tcontainerd\nState:\tS (sleeping)\nNSpid:\t900\n")
    assert chosen(node).beside != ()


def test_the_kernels_own_zombie_and_rootless_process(tmp_path: Path) -> None:
    """A real child that nobody waits for, and one in namespaces of its own."""
    for name in ("zombierun", "rootlessrun"):
        shutil.copy("/bin/sleep", tmp_path / name)
    zombie = subprocess.Popen([tmp_path / "zombierun", "0"])
    own = subprocess.Popen(["unshare", "--user", "--mount", "--map-root-user", tmp_path / "rootlessrun", "60"])
    proc = Path("/proc")
    try:
        wait_for("a zombie", lambda: "Z (zombie)" in (proc / f"{zombie.pid}/status").read_text(), 10)
        wait_for("unshare", lambda: (proc / f"{own.pid}/comm").read_text() == "rootlessrun\n", 10)
        assert (proc / f"{zombie.pid}/comm").read_text() == "zombierun\n"
        assert [*running(proc, {"zombierun", "rootlessrun"})] == []
        assert not shares_mounts(proc, own.pid)
        assert shares_mounts(proc, zombie.pid)
    finally:
        own.kill()
        own.wait()
        zombie.wait()
