"""The observer as a process: its folder and its rights, what it never loads, and whom it makes room for."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.cli.ask_daemon import ask
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.errors import Exit
from nri_gpu.observe.observer import FRESH_S
from nri_gpu.system.capabilities import CHOWN
from tests.support.daemon import ENVIRONMENT, FOUR_GPUS, UUIDS, Launch, NriGpu
from tests.support.holding import FULL, MAJOR, holding
from tests.support.nvml import FakeGpu, build_fake_nvml
from tests.support.observer import Observing
from tests.support.waiting import wait_for
from tests.system.test_process_scan import AS_DROP_IN, NO_ROOT, WITHOUT
from tests.unit.verify.test_oci_bundles import write

WAIT_S = 20.0
RESIDENT_MAX_KIB = 40 << 10
STOPPED_S = 15.0  # for a verb to give up on an observer that hangs
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can keep a folder from others")
# A pod's container with GPU 1 of the simulated node, as containerd writes it.
SPEC = {
    "annotations": {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.sandbox-namespace": "ml",
        "io.kubernetes.cri.sandbox-name": "train",
        "io.kubernetes.cri.container-name": "main",
    },
    "linux": {"devices": [{"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}]},
}
# All that may be configured is on, and each part has done something when the modules are listed.
LOADED = """
import asyncio, os, signal, sys
from pathlib import Path
from nri_gpu.cli import observe_command
from nri_gpu.observe.observe_process import ObserveProcess

serve = ObserveProcess._serve

async def listing(self):
    serving = asyncio.create_task(serve(self))
    while not self._observer.ready:
        await asyncio.sleep(0.02)
    await self._fresh()
    for path, question in ((sys.argv[-1], b"GET /metrics HTTP/1.1\\r\\n\\r\\n"), (sys.argv[-2], b"status\\n")):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(question)
        assert await reader.read()
        writer.close()
    print(self._xids.starts, self._source.starts, *sys.modules)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving

ObserveProcess._serve = listing
from nri_gpu.cli.main import parse
sys.exit(observe_command.run(parse(*sys.argv[1:-2])))
"""
NEVER = ("nri_gpu.ttrpc", "nri_gpu.nri.session", "nri_gpu.nri.subscription", "nri_gpu._pb", "grpc", "pynvml")


@pytest.fixture
def launch(folder: Path) -> Launch:
    return Launch(folder / "o", folder / "no-runtime")


@pytest.fixture
def observer(launch: Launch) -> Iterator[Observing]:
    with Observing(launch) as observer:
        observer.wait_looked()
        yield observer


def resident_kib(pid: int) -> int:
    return next(
        int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line
    )


def capabilities(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))


def test_what_it_never_loads(launch: Launch) -> None:
    root = build_fake_nvml(launch.base.parent / "driver", [FakeGpu()])
    metrics = launch.base.parent / "metrics.sock"
    settings = replace(launch.with_policy("[observe]\nxids = true\n"), topology=None)
    words = Observing(settings, more=["--driver-root", str(root), "--metrics", str(metrics)]).arguments
    command = [sys.executable, "-c", LOADED, *words, str(launch.state / "control.sock"), str(metrics)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    xids, nvml, *modules = done.stdout.split()
    assert (int(xids), int(nvml)) == (1, 1)
    assert "nri_gpu.daemon.metrics_page" in modules
    assert not [each for each in modules for name in NEVER if f"{each}.".startswith(f"{name}.")]


@AS_ROOT
def test_its_folder_is_roots_and_it_needs_little(observer: Observing) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in observer.folder.iterdir()}
    assert stat.S_IMODE(observer.folder.stat().st_mode) == 0o700
    assert modes == {"control.sock": 0o600, "lock": 0o600, "alive": 0o600}
    assert capabilities(observer.pid) & ~(1 << CHOWN) == 0
    assert resident_kib(observer.pid) < RESIDENT_MAX_KIB
    wait_for("its sign of life", lambda: (observer.folder / "alive").read_text().endswith(" ready\n"), WAIT_S)


@AS_ROOT
@pytest.mark.parametrize("granted", [True, False])
def test_a_pod_sees_processes_of_others_by_a_child_alone(folder: Path, launch: Launch, granted: bool) -> None:
    """With the capabilities of the chart's default grade, and without; neither may gain privileges."""
    minors = iter((FULL[1], 101, 102, 103))
    text = re.sub(r"(?m)^minor = \d", lambda _: f"minor = {next(minors)}", FOUR_GPUS.read_text())
    (folder / "topology.toml").write_text(text.replace("nvidia = 195", f"nvidia = {MAJOR}"))
    in_pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    settings = replace(launch, topology=folder / "topology.toml", environment=in_pod)
    before = [*(AS_DROP_IN if granted else WITHOUT), "--no-new-privs"]
    with holding(folder, FULL, script=NO_ROOT), Observing(settings, before=before) as observer:
        observer.wait_looked()
        assert capabilities(observer.pid) == 0
        opened = {uuid for each in observer.observed()["findings"] for uuid in each["gpu_uuids"]}
        assert opened == ({UUIDS[0]} if granted else set())


def test_it_answers_as_a_daemon_does_and_changes_nothing(observer: Observing) -> None:
    status = observer.status()
    assert status["node"]["observed"]
    assert [gpu["offered_to"] for gpu in status["gpus"]] == [None] * 4
    assert status["observer"]["looked_s"] == pytest.approx(time.time(), abs=WAIT_S)
    for words in (("cordon", "0", "--why", "x"), ("uncordon", "0"), ("repaired", "0")):
        done = observer.verb(*words)
        assert done.returncode == Exit.UNAVAILABLE
        assert "an observer answers, which changes nothing" in done.stderr
    assert observer.verb("status", "--processes").returncode == 0


def test_a_second_observer_says_whose_folder_it_is(observer: Observing) -> None:
    command = [*observer.words(), *observer.arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == Exit.UNAVAILABLE
    assert f"another observer (pid {observer.pid}) runs with run folder {observer.folder}" in done.stderr
    assert observer.status()["observer"]


def test_it_makes_room_for_a_daemon_and_comes_back(folder: Path, launch: Launch) -> None:
    daemon = NriGpu(Launch(folder / "d", folder / "no-runtime"))
    with Observing(launch, daemon.folder) as observer:
        observer.wait_looked()
        with daemon:
            observer.wait_logged("the observer shows nothing")
            wait_for("its socket to go", lambda: not (observer.folder / "control.sock").exists(), WAIT_S)
            assert observer.has_notified(f"STATUS=waiting: a daemon (pid {daemon.pid})")
            assert observer.verb("status").returncode == Exit.UNAVAILABLE
        observer.wait_logged("observing again")
        observer.wait_looked()
        assert observer.log().count("the observer shows nothing") == 1
        assert observer.terminate() == 0
    assert {each.name for each in observer.folder.iterdir()} == {"lock", "alive"}
    assert f"`nri-gpu status` shows what is seen path={observer.folder}" in observer.log()


def test_in_a_terminal_it_ends_where_there_is_a_daemon(folder: Path, launch: Launch) -> None:
    with NriGpu(Launch(folder / "d", folder / "no-runtime")) as daemon:
        wait_for("the daemon", lambda: (daemon.folder / "control.sock").exists(), WAIT_S)
        command = [*daemon.words(), *Observing(launch, daemon.folder).arguments]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0
        assert f"a daemon (pid {daemon.pid}) runs on this node" in done.stdout


def test_no_policy_keeps_it_from_observing(launch: Launch) -> None:
    settings = launch.with_policy("[observe]\nlook_s = 1\n")
    file = settings.policy
    assert file
    with Observing(settings, more=["--watch-policy"]) as observer:
        observer.wait_looked()
        assert "observe.look_s" in observer.status()["policy"]["rejected"]
        assert "ERROR   policy not taken, observing goes on" in observer.log()
        file.write_text("[observe]\nlook_s = 100\n")
        wait_for("the new policy", lambda: not observer.status()["policy"]["rejected"], WAIT_S)
        assert observer.status()["policy"]["source"] == str(file)
        file.unlink()
        observer.hang_up()
        wait_for("the fault", lambda: "no such file" in observer.status()["policy"]["rejected"], WAIT_S)
        assert observer.status()["policy"]["source"] == str(file)


def test_nvml_is_asked_as_status_has_it(launch: Launch) -> None:
    root = build_fake_nvml(launch.base.parent / "driver", [FakeGpu()])
    settings = launch.with_policy(f'[driver]\nroot = "{root}"\n')
    with Observing(replace(settings, topology=None)) as observer:
        observer.wait_looked()
        wait_for("a sample", lambda: bool(observer.status()["gpus"][0]["usage"]), WAIT_S)

        def age_s() -> float:
            return ask(observer.folder / "control.sock", "status", DaemonStatus).node.inventory_age_s or 0.0

        wait_for("it to be old", lambda: age_s() > FRESH_S, WAIT_S)
        assert observer.status()["node"]["inventory_age_s"] < FRESH_S


def test_one_that_hangs_holds_no_verb_up_for_long(observer: Observing) -> None:
    os.kill(observer.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert observer.verb("status").returncode == Exit.UNAVAILABLE
        assert time.monotonic() - began < STOPPED_S
    finally:
        os.kill(observer.pid, signal.SIGCONT)


def test_containers_that_come_and_go_are_seen_without_a_question(folder: Path, launch: Launch) -> None:
    """The chart's probes and `status -o json` of monitoring ask nothing that has the node looked at."""
    bundle = write(folder / "containerd", SPEC)
    with Observing(launch, more=["--containerd-state", str(folder / "containerd")]) as observer:

        def given() -> list[str]:
            status = ask(observer.folder / "control.sock", "status", DaemonStatus)
            return [each.gpu_uuid for each in status.observer.allocations] if status.observer else []

        observer.wait_looked()
        assert given() == [UUIDS[1]]
        shutil.rmtree(bundle)
        wait_for("the container to go", lambda: given() == [], WAIT_S)


@AS_ROOT
def test_a_folder_that_is_not_its_own_is_left_alone(folder: Path) -> None:
    """Not /run or /tmp by mistake, and not one whose owner could put another socket there."""
    shared, others = folder / "shared", folder / "others"
    for each in (shared, others):
        each.mkdir()
        each.chmod(0o755)
    (shared / "file").touch()
    os.chown(others, 65534, 65534)
    for path, why in ((shared, "is open to other users and has files"), (others, "belongs to user 65534")):
        command = [sys.executable, "-m", "nri_gpu", "observe", "--gpus", str(FOUR_GPUS), "--run-dir", str(path)]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert (done.returncode, stat.S_IMODE(path.stat().st_mode)) == (Exit.UNAVAILABLE, 0o755)
        assert f"run folder {path} {why}" in done.stderr
        assert not (path / "lock").exists()


def test_options_that_are_wrong(folder: Path, launch: Launch) -> None:
    taken = folder / "file"
    taken.write_text("")
    for words, code, said in (
        (["--pod-resources", "here"], Exit.USAGE, "--pod-resources: "),
        (["--metrics", "here"], Exit.USAGE, "--metrics: "),
        (["--run-dir", str(taken)], Exit.UNAVAILABLE, f"run folder {taken} cannot be used"),
    ):
        command = [sys.executable, "-m", "nri_gpu", "observe", "--gpus", str(FOUR_GPUS), *words]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == code
        assert said in done.stderr
        assert "Traceback" not in done.stderr
