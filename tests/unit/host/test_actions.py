"""Planning: one look in, actions and findings out, a case for each rule. No machine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.node import Majors
from nri_gpu.host.actions import HostPlan, LoadModule, make_plan
from nri_gpu.host.facts import (
    CharDevice,
    DevEntry,
    DevPath,
    Directory,
    HostFacts,
    HostFinding,
    KernelModule,
    OtherFile,
    Symlink,
)
from tests.unit.host.host_tree import CAPS, NVIDIA, OLD_UVM, UVM, address, information, params

BOTH = frozenset({KernelModule.NVIDIA, KernelModule.UVM})


def root(major: int, minor: int, mode: int = 0o666) -> CharDevice:
    return CharDevice(major, minor, mode, 0, 0)


ONE_GPU = {
    DevPath("nvidiactl"): root(NVIDIA, 255),
    DevPath("nvidia0"): root(NVIDIA, 0),
    DevPath("nvidia-uvm"): root(UVM, 0),
    DevPath("nvidia-uvm-tools"): root(UVM, 1),
}
LINKS = {DevPath(f"char/{node.major}:{node.minor}"): Symlink(f"../{path}") for path, node in ONE_GPU.items()}
READY: dict[DevPath, DevEntry] = {DevPath("char"): Directory(), **ONE_GPU, **LINKS}


def facts(**changes: object) -> HostFacts:
    """A host with one GPU that lacks nothing."""
    whole = HostFacts(
        devices=(address(0),),
        modules=BOTH,
        majors=Majors(NVIDIA, UVM, CAPS),
        params=params(),
        gpus={address(0): information(0)},
        entries=READY,
    )
    return replace(whole, **changes)


def dev(*gone: str, **entries: DevEntry) -> dict[DevPath, DevEntry]:
    """/dev of the host that lacks nothing, without some and with others: `nvidia_uvm` stands for `nvidia-uvm`."""
    kept = {path: entry for path, entry in READY.items() if path not in gone}
    return {**kept, **{DevPath(name.replace("_", "-")): entry for name, entry in entries.items()}}


def mig(name: str, minor: int, modify: int = 1, mode: int = 0o444) -> dict[str, str]:
    return {name: f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: {modify}\n"}


def planned(*, graphics: object = False, **changes: object) -> list[str]:
    """What is done, and what is found."""
    plan = make_plan(facts(**changes), graphics=bool(graphics))
    return [str(each) for each in (*plan.actions, *plan.findings)]


def char(major: int, minor: int, mode: str = "0666", owner: str = "0:0") -> str:
    return f"char {major}:{minor}, mode {mode}, owner {owner}"


LINK = f"char/{NVIDIA}:0"
CAPABILITIES = {**mig("gpu0/mig/gi1/access", 12), **mig("gpu0/mig/gi1/ci0/access", 13, mode=0o440)}
MODESET = frozenset({*BOTH, KernelModule.MODESET})
OLD = root(OLD_UVM, 0, 0o600)
# What differs from a host that lacks nothing, and what is done about it.
ACTIONS: dict[str, tuple[dict[str, object], list[str]]] = {
    "nothing": ({}, []),
    "no device": ({"devices": (), "modules": frozenset(), "entries": {}}, []),
    "a module that only graphics needs": ({"modules": MODESET}, []),
    "one module is not loaded": (
        {"modules": {KernelModule.NVIDIA}, "majors": Majors(NVIDIA), "entries": dev("nvidia0", "nvidia-uvm")},
        ["load module nvidia-uvm", f"make /dev/nvidia0: {char(NVIDIA, 0)}"],
    ),
    "a node and its link are missing": (
        {"entries": dev("nvidia0", LINK)},
        [f"make /dev/nvidia0: {char(NVIDIA, 0)}", f"link /dev/{LINK} to ../nvidia0"],
    ),
    "the driver was told another mode and group": (
        {"params": params(gid=44, mode=0o660), "entries": dev("nvidia0")},
        [
            f"fix /dev/nvidiactl: {char(NVIDIA, 255, '0660', '0:44')} (was mode 0666, owner 0:0)",
            f"make /dev/nvidia0: {char(NVIDIA, 0, '0660', '0:44')}",
        ],
    ),
    "a link as nvidia-ctk makes it": ({"entries": {**READY, DevPath(LINK): Symlink("/dev/nvidia0")}}, []),
    "the administrator's node lacks a link": (
        {"params": params(modify=0), "entries": dev(LINK)},
        [f"link /dev/{LINK} to ../nvidia0"],
    ),
    "an excluded GPU": ({"gpus": {address(0): information(0), address(1): information(1, excluded="Yes")}}, []),
}


@pytest.mark.parametrize(("changes", "actions"), ACTIONS.values(), ids=ACTIONS)
def test_what_is_done(changes: dict[str, object], actions: list[str]) -> None:
    assert planned(**changes) == actions


def test_a_fresh_boot() -> None:
    plan = make_plan(HostFacts(devices=(address(0),)))
    assert plan == HostPlan((LoadModule(KernelModule.NVIDIA), LoadModule(KernelModule.UVM)))
    assert plan.more_may_follow
    assert not make_plan(facts(entries={})).more_may_follow


def test_modeset_only_for_graphics() -> None:
    assert planned(graphics=True) == ["load module nvidia-modeset"]
    assert planned(graphics=True, modules=MODESET) == [
        f"make /dev/nvidia-modeset: {char(NVIDIA, 254)}",
        f"link /dev/char/{NVIDIA}:254 to ../nvidia-modeset",
    ]


FILE = OtherFile("a regular file")
WITHOUT_CHAR = {path: found for path, found in READY.items() if not path.startswith("char")}
# What lies in the way, and where; nothing is done then, and no link is made to a node that is wrong.
IN_THE_WAY: dict[str, tuple[str, DevEntry, dict[DevPath, DevEntry]]] = {
    "a block device for a node": ("nvidia0", OtherFile("a block device"), dev(LINK)),
    "a folder for a node": ("nvidia0", Directory(), dev(LINK)),
    "a link for a node": ("nvidia0", Symlink("/dev/null"), dev(LINK)),
    "a file for a link": (LINK, FILE, dev()),
    "a file for the folder of links": ("char", FILE, WITHOUT_CHAR),
    "a link for the folder of capabilities": ("nvidia-caps", Symlink("/tmp"), dev()),
}


@pytest.mark.parametrize(("path", "entry", "others"), IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_what_is_in_the_way_is_left_alone(path: str, entry: DevEntry, others: dict[DevPath, DevEntry]) -> None:
    capabilities = CAPABILITIES if path == "nvidia-caps" else {}
    (finding,) = planned(entries={**others, DevPath(path): entry}, capabilities=capabilities)
    assert finding.startswith(f"/dev/{path}: is {entry}, where ")
    assert finding.endswith(" belongs: remove it")


def test_the_administrators_nodes_are_never_made() -> None:
    entries = dev("nvidia0", LINK, nvidia_uvm=root(OLD_UVM, 0))
    missing, old = planned(params=params(modify=0), entries=entries)
    assert missing.startswith("/dev/nvidia0: is missing and should be ")
    assert "ModifyDeviceFiles: 0" in missing
    assert missing.endswith(f": mknod -m 0666 /dev/nvidia0 c {NVIDIA} 0")
    assert old.endswith(f": rm /dev/nvidia-uvm; mknod -m 0666 /dev/nvidia-uvm c {UVM} 0")


def test_unclear_parameters_stop_all_nodes() -> None:
    (unclear,) = planned(params=params(mode=666), entries={})
    assert unclear.startswith("/proc/driver/nvidia/params: ")
    unread = HostFinding("/proc/driver/nvidia/params", "cannot be read: Input/output error")
    assert make_plan(facts(params="", entries={}, unreadable=(unread,))) == HostPlan((), (unread,))


# The capabilities, the table of their minors, and what is found.
FAULTY_MIG = {
    "the two sources disagree": (mig("gpu0/mig/gi1/access", 12), "gpu0/gi1/access 13\n", "mig-minors has 13"),
    "two instances, one minor": (
        {**mig("gpu0/mig/gi1/access", 12), **mig("gpu0/mig/gi2/access", 12)},
        "",
        "so has gpu0/mig/gi1/access",
    ),
    "kept by the administrator": (mig("gpu0/mig/gi1/access", 12, modify=0), "", "DeviceFileModify: 0"),
    "no minor": ({"gpu0/mig/gi1/access": "x"}, "", "DeviceFileMinor"),
}


@pytest.mark.parametrize(("capabilities", "table", "words"), FAULTY_MIG.values(), ids=FAULTY_MIG)
def test_a_mig_instance_that_is_not_made(capabilities: dict[str, str], table: str, words: str) -> None:
    plan = make_plan(facts(capabilities=capabilities, mig_minors=table))
    (finding,) = plan.findings
    assert words in finding.reason
    assert all("gi2" not in str(action) for action in plan.actions)


FAULTY_GPUS = {
    "no minor": ({address(0): "Model: x\n"}, f"{address(0)}/information: "),
    "two GPUs, one minor": ({address(0): information(0), address(1): information(0)}, f"{address(1)}/information: "),
    "a driver that serves none": ({}, "/proc/driver/nvidia/gpus: "),
}


@pytest.mark.parametrize(("gpus", "path"), FAULTY_GPUS.values(), ids=FAULTY_GPUS)
def test_a_gpu_without_a_node(gpus: dict[str, str], path: str) -> None:
    (finding,) = planned(gpus=gpus)
    assert path in finding


NO_MAJORS = {
    "nvidia ": Majors(None, UVM, CAPS),
    "nvidia-uvm ": Majors(NVIDIA, None, CAPS),
    "-caps ": Majors(NVIDIA, UVM),
}


@pytest.mark.parametrize(("name", "majors"), NO_MAJORS.items(), ids=NO_MAJORS)
def test_a_module_without_its_major(name: str, majors: Majors) -> None:
    found = planned(majors=majors, capabilities=mig("gpu0/mig/gi1/access", 12))
    (finding,) = (each for each in found if each.startswith("/proc/devices: "))
    assert name in finding
