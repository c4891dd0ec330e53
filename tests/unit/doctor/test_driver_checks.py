"""One broken driver a test: it is found, with its fix, and nothing else is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from shutil import rmtree
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.daemon.answers import PolicyStatus
from nri_gpu.daemon.view import status_of
from nri_gpu.doctor.driver_checks import driver_findings
from nri_gpu.doctor.examined import Examined
from nri_gpu.domain.finding import Level
from nri_gpu.domain.health import Sign
from nri_gpu.domain.node import Majors
from nri_gpu.driver.driver_scan import scan
from nri_gpu.driver.stage import stage
from nri_gpu.policy.model import BUILT_IN, DriverSettings, Policy
from tests.support import builders as make
from tests.support.driver_root import put_libraries
from tests.support.user_namespace import OF_THE_HOST, run
from tests.support.views import view
from tests.unit.doctor.node import HEALTHY_POLICY, RELEASE, VERSION, DoctorNode, old_uvm
from tests.unit.host.host_tree import NVIDIA

# What doctor finds of the nodes and the machine below a folder, a line each.
DOCTOR: Final = """
import sys
from pathlib import Path
from nri_gpu.doctor.driver_checks import driver_findings
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.host_checks import host_findings
seen = Examined(root=Path(sys.argv[1]))
for each in (*driver_findings(seen), *host_findings(seen, None)):
    print(each.level, each.subject, each.meaning)
"""
Break = Callable[[DoctorNode], object]


def test_a_healthy_node_has_no_findings(node: DoctorNode) -> None:
    assert node.found() == {}
    assert node.examine().counts[Level.OK] >= 10


def no_modules(node: DoctorNode) -> None:
    for module in ("nvidia", "nvidia_uvm"):
        rmtree(node.root / "sys/module" / module)


def not_built(node: DoctorNode) -> None:
    no_modules(node)
    own = ("video/fbdev/nvidia/nvidiafb", "i2c/busses/i2c-nvidia-gpu", "platform/x86/nvidia-wmi-ec-backlight")
    lines = "".join(f"kernel/drivers/{name}.ko.xz:\n" for name in own)
    node.write(f"lib/modules/{RELEASE}/modules.dep", lines)


def no_libcuda(node: DoctorNode) -> None:
    for path in (node.root / "usr").rglob("libcuda.so*"):
        path.unlink()


def switches(node: DoctorNode) -> None:
    node.write("proc/driver/nvidia-nvswitch/devices/0000:01:00.0", "")


def no_persistence(node: DoctorNode) -> None:
    node.dead_socket("run/nvidia-persistenced/socket")


def unseen_services(node: DoctorNode) -> None:
    node.process(2, "sh")
    switches(node)
    no_persistence(node)


def no_gpus(node: DoctorNode) -> None:
    no_modules(node)
    rmtree(node.root / "sys/bus/pci/devices")
    (node.root / "sys/bus/pci/devices").mkdir()


def no_bus(node: DoctorNode) -> None:
    no_modules(node)
    rmtree(node.root / "sys/bus")


def other_version(node: DoctorNode) -> None:
    for module in ("nvidia", "nvidia_uvm"):
        node.write(f"sys/module/{module}/version", "570.26\n")


def both(driver: str) -> Break:
    def bind(node: DoctorNode) -> None:
        for minor in (0, 1):
            node.bind(minor, driver)

    return bind


def of_virtual_machines(node: DoctorNode) -> None:
    no_modules(node)
    both("vfio-pci")(node)


def beside_a_virtual_machines(node: DoctorNode) -> None:
    of_virtual_machines(node)
    node.bind(1, "nouveau")


BROKEN: dict[str, Break] = {
    "module not loaded": no_modules,
    "not built for this kernel": not_built,
    "no uvm": lambda node: rmtree(node.root / "sys/module/nvidia_uvm"),
    "a GPU that the module does not take": both(""),
    "nouveau": both("nouveau"),
    "NovaCore": both("NovaCore"),
    "NovaCore by its module's name": both("nova_core"),
    "another driver": both("xdma"),
    "an old card beside a GPU": lambda node: node.bind(1, "nouveau"),
    "an old card beside a virtual machine's GPU": beside_a_virtual_machines,
    "a card that no driver has": lambda node: node.bind(1, ""),
    "all for virtual machines": of_virtual_machines,
    "a persistence daemon that keeps nothing": lambda node: node.process(
        800, "nvidia-persistenced", "/usr/bin/nvidia-persistenced", "--user", "nvpd", "--no-persistence-mode"
    ),
    "libraries of another version": other_version,
    "modules of two versions": lambda node: node.write("sys/module/nvidia_uvm/version", "570.26\n"),
    "no libraries": lambda node: rmtree(node.root / "usr"),
    "no libcuda": no_libcuda,
    "no node": lambda node: node.remove("dev/nvidia1"),
    "an old major": old_uvm,
    "a mode for root alone": lambda node: (node.tree.dev / "nvidia0").chmod(0o600),
    "no link by number": lambda node: node.remove(f"dev/char/{NVIDIA}:0"),
    "no capability node": lambda node: node.tree.mig("gpu0/gi1", 12),
    "no persistence daemon": no_persistence,
    "no fabric manager": switches,
    "services that a container does not see": unseen_services,
    "no GPU": no_gpus,
    "a PCI bus that is not shown": no_bus,
}


@pytest.mark.usefixtures("on_x86_64")
@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_found_with_its_fix(node: DoctorNode, name: str) -> None:
    BROKEN[name](node)
    node.hold("driver", BROKEN, name)


def test_a_fabric_manager_that_runs(node: DoctorNode) -> None:
    switches(node)
    node.process(800, "nv-fabricmanager", "/usr/bin/nv-fabricmanager")
    assert node.found() == {}


def no_libraries(node: DoctorNode) -> None:
    rmtree(node.root / "usr")


UPGRADED = {"libraries of another version": other_version, "no libraries": no_libraries}


@pytest.mark.parametrize(("name", "change"), UPGRADED.items(), ids=UPGRADED)
def test_a_daemon_that_serves_the_modules_driver_is_asked_first(node: DoctorNode, name: str, change: Break) -> None:
    change(node)
    kernel = "570.26" if change is other_version else VERSION
    status = node.status()
    serving = replace(status, node=replace(status.node, driver_generation=f"{kernel}-0a1b2c3d"))
    finding = node.only(status=serving)
    assert (finding.level, finding.subject) == (Level.WARNING, "driver versions")
    assert f"ontainers get the staged ones of {kernel}" in finding.meaning
    for refused in (None, replace(serving, node=replace(serving.node, inventory_fault="NVML does not start"))):
        findings = node.found(status=refused)
        assert findings["driver versions"].level is Level.ERROR, name


def test_what_the_staged_driver_has_is_not_said_to_be_lacking(node: DoctorNode) -> None:
    files = stage(scan(node.root), node.root / "staged")
    no_libcuda(node)
    status = node.status()
    serving = replace(status, node=replace(status.node, driver_generation=files.generation))
    policy = replace(HEALTHY_POLICY, driver=DriverSettings(stage_dir="/staged"))
    seen = Examined(root=node.root, policy=policy, status=serving)
    assert "driver files" not in {each.subject for each in driver_findings(seen) if each.level is Level.ERROR}


OPERATORS = replace(HEALTHY_POLICY, driver=DriverSettings(root="/run/nvidia/driver"))


def in_a_container(node: DoctorNode) -> None:
    """Both as the GPU Operator's driver container has them, with the driver's tree."""
    no_persistence(node)
    switches(node)
    put_libraries(node.root / "run/nvidia/driver", "usr/lib64", VERSION)
    for pid, name in ((800, "nv-fabricmanager"), (801, "nvidia-persistenced")):
        node.process(pid, name, f"/usr/bin/{name}")
        node.write(f"proc/{pid}/status", f"Name:\t{name}\nNSpid:\t{pid}\t12\n")


def test_services_in_the_drivers_container(node: DoctorNode) -> None:
    in_a_container(node)
    findings = {each.subject: each for each in node.examine(policy=OPERATORS).findings}
    assert findings["fabric manager"].meaning == "runs, for 1 NVSwitches, in a container (pid 800)"
    assert findings["persistence"].meaning.endswith(", in a container (pid 801)")


def test_by_the_socket_in_its_root(node: DoctorNode) -> None:
    in_a_container(node)
    node.remove("proc/801/comm")
    node.listen("run/nvidia/driver/run/nvidia-persistenced/socket")
    assert "persistence" not in node.found(policy=OPERATORS)
    mounted = replace(OPERATORS, driver=DriverSettings(root="/driver-root", host_root="/run/nvidia/driver"))
    assert "persistence" not in node.found(policy=mounted)


def test_elsewhere_a_containers_process_proves_nothing(node: DoctorNode) -> None:
    in_a_container(node)
    assert node.found().keys() >= {"fabric manager", "persistence"}


def test_what_the_drivers_container_lacks_is_its_own_to_start(node: DoctorNode) -> None:
    in_a_container(node)
    for pid in (800, 801):
        node.remove(f"proc/{pid}/comm")
    found = node.found(policy=OPERATORS)
    assert not any("systemctl" in line for each in found.values() for line in each.fix)


@pytest.mark.parametrize("units", [(), ("nvidia-fabricmanager",), ("nvidia-fabricmanager", "nvidia-imex")])
def test_a_fabric_that_is_not_ready(node: DoctorNode, units: tuple[str, ...]) -> None:
    """HGX B200 and NVL72 have no NVSwitch of their own to count."""
    for unit in units:
        node.write(f"etc/systemd/system/{unit}.service", "")
    waiting = make.gpu(1, signs=(Sign.FABRIC_NOT_READY,))
    seen = make.node((make.gpu(0), waiting), driver_version=VERSION, majors=Majors(1510, 1511, 1512))
    finding = node.only(status=status_of(view(node=seen, policy=PolicyStatus(BUILT_IN, ""))))
    assert (finding.level, finding.subject) == (Level.ERROR, "NVLink fabric")
    assert "GPU 1: its fabric is not ready" in finding.meaning
    assert "IMEX" in finding.meaning
    assert [line.split()[3] for line in finding.fix if line.startswith("systemctl")] == list(units)


def test_a_persistence_daemon_seen_by_its_process(node: DoctorNode) -> None:
    node.remove("run/nvidia-persistenced/socket")
    node.process(800, "nvidia-persistenced", "/usr/bin/nvidia-persistenced")
    assert node.found() == {}


def test_in_a_container_the_gpus_of_its_host_are_not_missed(node: DoctorNode) -> None:
    node.remove("dev/nvidia1")
    node.remove(f"dev/char/{NVIDIA}:1")
    assert set(node.found()) >= {"device nodes"}
    node.write("run/systemd/container", "lxc")
    assert node.found() == {}


@pytest.mark.parametrize("driver", ["vfio-pci", "nvgrace_gpu_vfio_pci"])
def test_a_gpu_of_a_virtual_machine_is_meant_to_be_there(node: DoctorNode, driver: str) -> None:
    node.bind(1, driver)
    assert node.found() == {}


@pytest.mark.parametrize("driver", ["", "nouveau", "NovaCore", "xdma"])
def test_an_old_card_keeps_its_console(node: DoctorNode, driver: str) -> None:
    node.bind(1, driver)
    finding = node.only()
    assert (finding.level, "It may be the display's" in finding.meaning) == (Level.WARNING, True)
    assert not any(word in fix for fix in finding.fix for word in ("unbind", "blacklist", "reboot", "modprobe"))


def test_a_simulated_node_needs_no_driver(node: DoctorNode) -> None:
    no_modules(node)
    status = node.status()
    assert node.found(status=replace(status, node=replace(status.node, simulated=True))) == {}


def test_a_driver_root_of_its_own(node: DoctorNode) -> None:
    (node.root / "usr").rename(node.root / "opt")
    assert "driver versions" in node.found()
    assert "driver versions" not in node.found(policy=Policy(driver=DriverSettings(root="/opt")))


def test_an_old_driver_that_was_left_behind_is_named(node: DoctorNode) -> None:
    """It is in an earlier folder; a reboot would change nothing."""
    put_libraries(node.root, "usr/lib64", "470.256.02")
    assert node.found() == {}
    said = [finding.meaning for finding in node.examine().findings if finding.subject == "driver versions"]
    assert said[0].endswith("; not used: 470.256.02 in usr/lib64")


def test_the_driver_root_of_a_daemon_in_a_pod(node: DoctorNode) -> None:
    mounted = DriverSettings(root="/driver-root", host_root="/")
    assert "driver versions" not in node.found(policy=Policy(driver=mounted))


@pytest.mark.parametrize("name", ["nvidia.ko", "nvidia.ko.zst", "nvidia-current.ko.xz", "nvidia-tesla-535-current.ko"])
def test_a_module_that_is_installed_and_not_loaded(node: DoctorNode, name: str) -> None:
    no_modules(node)
    node.write(f"lib/modules/{RELEASE}/modules.dep", f"updates/dkms/{name}:\n")
    assert "module nvidia is not loaded" in node.found()["driver modules"].meaning


def test_files_that_only_root_may_read(node: DoctorNode) -> None:
    (node.root / "proc/driver/nvidia/params").chmod(0o600)
    finding = node.found_by_nobody()["device nodes"]
    assert (finding.level, finding.fix) == (Level.UNSEEN, ("sudo nri-gpu doctor",))
    assert "/proc/driver/nvidia/params: cannot be read: Permission denied" in finding.meaning


def test_an_unprivileged_containers_nodes_have_owners_of_its_hosts(node: DoctorNode) -> None:
    for path in node.tree.dev.glob("nvidia*"):
        os.chown(path, OF_THE_HOST, OF_THE_HOST)
    assert "owner 70000:70000" in node.found()["device nodes"].meaning
    lines = run(sys.executable, "-c", DOCTOR, str(node.root)).stdout.splitlines()
    assert [line for line in lines if " device nodes all are there" in line]
    (said,) = (line for line in lines if "unprivileged container" in line)
    assert said.startswith("ok user namespace")
