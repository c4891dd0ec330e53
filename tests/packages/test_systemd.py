"""The package where systemd runs: its units start, are restarted by an upgrade beneath containers, and go with it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from nri_gpu import __version__
from nri_gpu.domain.errors import Exit
from nri_gpu.ledger.ledger import GrantPhase
from tests.packages.conftest import AT, DAEMONS, NEWER, Debs
from tests.support import packages
from tests.support.booted_root import BootedRoot, starting
from tests.support.containerd import Containerd
from tests.support.daemon import UUIDS
from tests.support.driver_root import make_driver_root
from tests.support.kubeconfig import kubeconfig
from tests.support.own_root import SOCKETS, give_own_root
from tests.support.pods import ContainerSpec
from tests.support.waiting import wait_for

# The runtime mounts what the daemon staged, so both have to see it under one name.
STAGED: Final = "mkdir -p /var/lib/nri-gpu {base}/staged && mount --bind {base}/staged /var/lib/nri-gpu"
GPUS: Final = "--gpus /usr/share/nri-gpu/topologies/four-gpus.toml --driver-root /driver"
OPTIONS: Final = f"--stand-by {GPUS} --socket /var/run/nri/nri.sock"
DROP_IN: Final = "/run/systemd/system/nri-gpu.service.d"
UNITS: Final = ("nri-gpu.service", "nri-gpu-guard.service")
CDI: Final = "/run/cdi/nri-gpu.json"
CLIENTS: Final = r"run-nri\x2dgpu-mps-clients.mount"
PREPARED: Final = "this machine has no NVIDIA display device on its PCI bus"
POLICY: Final = """
[kubelet]
enabled = true
pool = "counted"
[dra]
enabled = true
pool = "claims"
[mps]
enabled = true
[[pool]]
name = "counted"
device = ["0", "1"]
[[pool]]
name = "claims"
model = ["*"]
"""
KUBECONFIG: Final = json.dumps(kubeconfig({"server": "https://127.0.0.1:1"}, {"token": "any"}))
SERVES_S: Final = 30.0
FORGOTTEN_S: Final = 90.0  # above ledger.created_grace_s: a container that came and went while no daemon was there
PAUSE_S: Final = 0.1
# gpu-busy: where nobody told the end of a container, its GPU is held for as long as a request may take.
FOR_NOW: Final = r"nri-gpu \[(not-granted|node-not-ready|gpu-busy)\]"


class Machine(Struct, frozen=True):
    """A containerd, and the system whose systemd runs the package beside it."""

    node: Containerd
    root: BootedRoot

    def property(self, unit: str, name: str) -> str:
        return self.root.run("systemctl", "show", "--value", "--property", name, unit).strip()

    def runs_from(self, unit: str) -> str:
        return self.root.run("cat", f"/proc/{self.property(unit, 'MainPID')}/cmdline")

    def held(self) -> dict[str, list[str]]:
        """`pod/container` -> UUIDs of the GPUs that it holds."""
        grants = json.loads(self.root.run("cat", "/run/nri-gpu/ledger.json"))["grants"]
        held = [each for each in grants if each["phase"] != GrantPhase.LAPSED]
        return {f"{each['pod']}/{each['container']}": each["gpu_uuids"] for each in held}

    def create_while(self, *words: str) -> None:
        """Run it, and containers all the while: each runs with its GPU, or is refused and created again."""
        command = subprocess.Popen(self.root.command(*words), stdout=subprocess.DEVNULL)
        cri = self.node.cri
        while command.poll() is None:
            pod = cri.asking("device=2", "short")
            container = cri.run_persistently(pod, ContainerSpec(), FOR_NOW)
            assert "/dev/nvidia2" in cri.status(container).device_paths
            cri.remove(container)  # before its pod: see tests/conformance/test_chart.py
            cri.remove_pod(pod.id)
            time.sleep(PAUSE_S)
        assert command.returncode == 0

    def reload(self, said: str) -> None:
        """Until the journal has said it once more."""
        before = self._logged(said)
        self.root.run("systemctl", "reload", "nri-gpu")
        wait_for(said, lambda: self._logged(said) > before, SERVES_S, self._explain)

    def _logged(self, said: str) -> int:
        return self.root.run("journalctl", "--unit", "nri-gpu").count(said)

    def wait_serving(self) -> None:
        wait_for("both units", lambda: self._active() == "active\nactive\n", SERVES_S, self._explain)

    def _active(self) -> str:
        return self.root.try_run("systemctl", "is-active", *UNITS).stdout

    def _explain(self) -> str:
        return self.root.try_run("systemctl", "status", "--no-pager", "--lines=40", *UNITS).stdout


@contextmanager
def booted(debs: Debs, layer: Path) -> Iterator[Machine]:
    """A system that was booted with what is installed in a layer, beside a containerd."""
    node = Containerd(packages.fetch(packages.Version.V2_1))
    give_own_root(node.supervisor_pid, node.base, SOCKETS + STAGED)
    drop_in = node.base / "drop-in"
    drop_in.mkdir()
    (drop_in / "test.conf").write_text(starting(f"/usr/bin/nri-gpu run {OPTIONS}"))
    seen = {
        debs.folder: AT,
        node.base / "nri": "/run/nri",
        node.base / "staged": "/var/lib/nri-gpu",
        make_driver_root(node.base / "driver"): "/driver",
        drop_in: DROP_IN,
    }
    with node, BootedRoot("bookworm", seen, over=layer) as root:
        yield Machine(node, root)


@pytest.fixture
def machine(debs: Debs, with_package: Path) -> Iterator[Machine]:
    with booted(debs, with_package) as machine:
        machine.wait_serving()
        yield machine


def test_systemd_starts_restarts_and_forgets_it(machine: Machine, debs: Debs) -> None:
    root, node = machine.root, machine.node
    assert root.run("systemctl", "is-system-running") == "running\n"
    train = node.cri.run_asking("device=1", "train")
    held = {"train/main": [UUIDS[1]]}

    machine.create_while("dpkg", "-i", *debs.newer)
    machine.wait_serving()
    for unit in UNITS:
        assert f"/live/{NEWER}-" in machine.runs_from(unit)
        assert machine.property(unit, "NRestarts") == "0"  # by systemd, of what has failed
    daemon, guard = (int(machine.property(each, "ActiveEnterTimestampMonotonic")) for each in UNITS)
    assert daemon < guard
    wait_for("the ledger", lambda: machine.held() == held, FORGOTTEN_S, lambda: str(machine.held()))
    assert "[gpu-busy]" in str(node.cri.refused("device=1", "third"))

    # What a runtime outside has mounted is not seen in there.
    root.run("umount", "--lazy", "/var/lib/nri-gpu")
    root.run("apt", "purge", "-y", *DAEMONS)
    assert root.run("systemctl", "list-units", "--all", "--no-legend", "nri-gpu*") == ""
    assert root.run("systemctl", "is-system-running") == "running\n"
    assert [path for path in root.files() if "nri-gpu" in path] == [DROP_IN]
    assert node.cri.execute(train, "/bin/ls", "/dev/nvidia1").code == 0


def test_a_second_daemon_serves_during_an_upgrade(machine: Machine, debs: Debs) -> None:
    """The lines of docs/upgrade.md, "Upgrade under load", with the unit's options."""
    root = machine.root
    as_unit = (
        "--unit=nri-gpu-next",
        *(f"--property={each}" for each in ("Type=notify", "KillMode=process", "StateDirectory=nri-gpu")),
    )
    root.run("systemd-run", *as_unit, "/usr/bin/nri-gpu", "run", *OPTIONS.split())
    machine.create_while("apt", "install", *debs.newer)
    assert machine.property("nri-gpu-next", "StatusText") == "serving /var/run/nri/nri.sock"
    assert machine.property("nri-gpu", "StatusText").startswith("standing by")
    assert f"/live/{__version__}-" in machine.runs_from("nri-gpu-next")
    root.run("systemctl", "stop", "nri-gpu-next")
    wait_for("the unit to serve", lambda: machine.property("nri-gpu", "StatusText").startswith("serving"), SERVES_S)
    assert f"/live/{NEWER}-" in machine.runs_from("nri-gpu")


def test_a_policy_that_vanishes_under_the_unit(machine: Machine) -> None:
    """What the unit may write, what root reads of it, and the operator's line."""
    root, cri = machine.root, machine.node.cri
    file, memory = "/etc/nri-gpu/policy.toml", "/var/lib/nri-gpu/policy.in-force"
    assert root.run("cat", memory) == f"{file}\n"
    (root.path / file[1:]).write_text('[namespaces]\nallow = ["prod"]\n')
    machine.reload("policy reloaded")
    root.run("mv", file, "/root/policy.toml")
    machine.reload("policy not reloaded, the old one stays")
    assert "[not-allowed]" in str(cri.refused("1", "first"))
    root.run("systemctl", "restart", *UNITS)
    machine.wait_serving()
    assert "[not-allowed]" in str(cri.refused("1", "second"))
    assert root.try_run("nri-gpu", "status").returncode == Exit.FINDING
    assert root.try_run("nri-gpu", "check").returncode == Exit.CONFIGURATION
    root.run("nri-gpu", "check", "--forget")
    machine.reload("policy reloaded")
    cri.run_asking("1", "third")
    assert root.try_run("cat", memory).returncode == 1


def test_the_other_units_start_and_go_too(machine: Machine) -> None:
    """As their pages have it, before a kubelet has been there, and with /run as it is after a boot."""
    root = machine.root
    command = f"/usr/bin/nri-gpu cdi generate --output {CDI} {GPUS}"
    for name, text in {
        "nri-gpu/policy.toml": POLICY,
        "kubernetes/kubelet.conf": KUBECONFIG,
        "systemd/system/nri-gpu-cdi.service.d/test.conf": starting(command),
    }.items():
        root.run("mkdir", "-p", f"/etc/{Path(name).parent}")
        (root.path / "etc" / name).write_text(text)
    root.run("touch", "/usr/lib/systemd/system/kubelet.service")  # installed, and never run
    for name, lacking in (("metrics", "[metrics]"), ("kubelet", ""), ("stray", "[stray]"), ("mps", "")):
        said = root.run("nri-gpu", "enable", name)
        assert said.startswith("link /etc/systemd/system/nri-gpu.service.d/")
        assert ("advice: " in said, f"    # below {lacking}" in said) == (bool(lacking), bool(lacking))
    assert root.run("cat", "/etc/nri-gpu/policy.toml") == POLICY
    assert "due: systemd has not read this yet" in root.run("nri-gpu", "enable", "mps")
    root.run("systemctl", "daemon-reload")
    assert root.run("nri-gpu", "enable", "mps") == "nothing to do: mps is enabled\n"

    root.run("systemctl", "restart", "nri-gpu")
    assert machine.property(CLIENTS, "ActiveState") == "active"
    wait_for("the kubelet's CDI device", lambda: "nri-gpu-required" in root.run("ls", "/run/cdi"), SERVES_S)
    _enable_the_units(machine)
    registry = "/var/lib/kubelet/plugins_registry"
    wait_for("the driver", lambda: "gpu.nri.io" in root.try_run("ls", registry).stdout, SERVES_S)
    wait_for("prepare", lambda: PREPARED in root.run("journalctl", "--unit", "nri-gpu-prepare"), SERVES_S)
    root.run("systemctl", "reload", "nri-gpu")
    wait_for("the reload", lambda: "policy reloaded" in root.run("journalctl", "--unit", "nri-gpu"), SERVES_S)
    wait_for("the first specification", lambda: root.try_run("rm", CDI).returncode == 0, SERVES_S)
    root.run("touch", "/etc/nri-gpu/policy.toml")
    wait_for("the specification", lambda: root.try_run("test", "-s", CDI).returncode == 0, SERVES_S)
    # Its names are another file's too, and then its own again. A path unit misses what happens while its service runs.
    look = "touch /run/cdi; sleep 0.5; test -s"
    root.run("cp", CDI, f"{CDI}.copy.json")
    wait_for("its removal", lambda: root.try_run("sh", "-c", f"{look} {CDI}").returncode == 1, SERVES_S)
    root.run("rm", f"{CDI}.copy.json")
    wait_for("the specification again", lambda: root.try_run("sh", "-c", f"{look} {CDI}").returncode == 0, SERVES_S)
    assert root.run("systemctl", "is-system-running") == "running\n"

    said = root.run("apt", "purge", "-y", *DAEMONS)
    assert "/var/lib/nri-gpu is empty; a file system is mounted on it, so it stays" in said
    assert root.run("systemctl", "list-units", "--all", "--no-legend", "nri-gpu*", CLIENTS) == ""
    assert {path for path in root.files() if "nri-gpu" in path} == {DROP_IN, "/var/lib/nri-gpu"}


def _enable_the_units(machine: Machine) -> None:
    """By `nri-gpu enable`, where one of a checkout hides the package's, as the pages once told to install it."""
    root, hiding = machine.root, "/etc/systemd/system/nri-gpu-prepare.service"
    (root.path / hiding[1:]).write_text("[Service]\nExecStart=/opt/nri-gpu/bin/nri-gpu prepare\n")
    assert f"{hiding} hides the package's" in " ".join(root.try_run("nri-gpu", "doctor").stdout.split())
    assert f"advice: {hiding} hides the package's" in root.run("nri-gpu", "enable", "cdi", "--dry-run")
    refused = root.try_run("nri-gpu", "enable", "prepare", "--now")
    assert (refused.returncode, "nothing was changed" in refused.stdout) == (Exit.FINDING, True)
    root.run("nri-gpu", "enable", "prepare", "--now", "--replace")
    root.run("test", "-f", f"{hiding}.old")
    root.run("rm", f"{hiding}.old")
    for name in ("dra", "cdi"):
        root.run("nri-gpu", "enable", name, "--now")
    assert machine.property("nri-gpu-cdi.path", "ActiveState") == "active"
    root.run("nri-gpu", "disable", "cdi", "--now")
    assert machine.property("nri-gpu-cdi.path", "ActiveState") == "inactive"
    assert root.try_run("systemctl", "is-enabled", "nri-gpu-cdi.path").stdout == "disabled\n"
    assert root.run("nri-gpu", "disable", "cdi") == "nothing to do: cdi is disabled\n"
    root.run("nri-gpu", "enable", "cdi", "--now")
    assert machine.property("nri-gpu-prepare.service", "NeedDaemonReload") == "no"
