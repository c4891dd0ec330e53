"""Planning: one look in, actions and findings out, a case for each rule. No machine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.node import Majors
from nri_gpu.host.facts import (
    CharDevice,
    DevEntry,
    DevPath,
    Directory,
    Finding,
    HostFacts,
    KernelModule,
    OtherFile,
    Symlink,
)
from nri_gpu.host.plan import FixNode, HostPlan, LoadModule, MakeLink, MakeNode, make_plan
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


def only_finding(plan: HostPlan) -> Finding:
    assert len(plan.findings) == 1
    return plan.findings[0]


def test_a_ready_host_needs_nothing() -> None:
    assert make_plan(facts()) == HostPlan()


def test_without_a_device_nothing_is_planned() -> None:
    assert make_plan(facts(devices=(), modules=frozenset(), entries={})) == HostPlan()


def test_a_fresh_boot() -> None:
    plan = make_plan(HostFacts(devices=(address(0),)))
    assert plan == HostPlan((LoadModule(KernelModule.NVIDIA), LoadModule(KernelModule.UVM)))
    assert plan.more_may_follow


def test_modeset_only_for_graphics() -> None:
    assert make_plan(facts(modules={*BOTH, KernelModule.MODESET})) == HostPlan()
    assert make_plan(facts(), graphics=True).actions == (LoadModule(KernelModule.MODESET),)
    plan = make_plan(facts(modules={*BOTH, KernelModule.MODESET}), graphics=True)
    assert plan.actions == (
        MakeNode(DevPath("nvidia-modeset"), root(NVIDIA, 254)),
        MakeLink(DevPath(f"char/{NVIDIA}:254"), "../nvidia-modeset"),
    )


def test_missing_nodes_are_made_each_with_its_link() -> None:
    plan = make_plan(facts(entries={}))
    assert not plan.findings
    assert not plan.more_may_follow
    assert plan.actions == tuple(
        action
        for path, node in ONE_GPU.items()
        for action in (MakeNode(path, node), MakeLink(DevPath(f"char/{node.major}:{node.minor}"), f"../{path}"))
    )


def test_what_is_known_is_done_beside_loading_the_rest() -> None:
    plan = make_plan(facts(modules={KernelModule.NVIDIA}, majors=Majors(NVIDIA), entries={}))
    assert plan.actions[0] == LoadModule(KernelModule.UVM)
    assert MakeNode(DevPath("nvidia0"), root(NVIDIA, 0)) in plan.actions
    assert not [a for a in plan.actions if isinstance(a, MakeNode) and "uvm" in a.path]


def test_mode_and_owner_are_as_the_driver_was_told() -> None:
    wanted = CharDevice(NVIDIA, 0, 0o660, 0, 44)
    plan = make_plan(facts(params=params(gid=44, mode=0o660)))
    assert FixNode(DevPath("nvidia0"), wanted, root(NVIDIA, 0)) in plan.actions
    assert {action.path for action in plan.actions if isinstance(action, FixNode)} == {"nvidiactl", "nvidia0"}
    made = make_plan(facts(params=params(gid=44, mode=0o660), entries=dev("nvidia0"))).actions
    assert MakeNode(DevPath("nvidia0"), wanted) in made


def test_a_node_of_an_old_major_is_replaced() -> None:
    old = root(OLD_UVM, 0, 0o600)
    plan = make_plan(facts(entries=dev(nvidia_uvm=old)))
    assert plan.actions == (MakeNode(DevPath("nvidia-uvm"), root(UVM, 0), replaces=old),)


@pytest.mark.parametrize(
    "entry",
    [OtherFile("a regular file"), OtherFile("a block device"), Directory(), Symlink("nvidia1"), Symlink("/dev/null")],
    ids=str,
)
def test_what_is_no_character_device_is_left_alone(entry: DevEntry) -> None:
    plan = make_plan(facts(entries=dev("nvidia0", f"char/{NVIDIA}:0", nvidia0=entry)))
    assert plan.actions == ()
    assert str(only_finding(plan)).startswith(f"/dev/nvidia0: is {entry}")


@pytest.mark.parametrize("target", ["../nvidia0", "/dev/nvidia0"])
def test_a_good_link_stays(target: str) -> None:
    assert make_plan(facts(entries={**READY, DevPath(f"char/{NVIDIA}:0"): Symlink(target)})) == HostPlan()


def test_a_link_that_leads_elsewhere_is_replaced() -> None:
    path = DevPath(f"char/{NVIDIA}:0")
    plan = make_plan(facts(entries={**READY, path: Symlink("../nvidia9")}))
    assert plan.actions == (MakeLink(path, "../nvidia0", "../nvidia9"),)


def test_what_is_no_link_in_its_place_is_left_alone() -> None:
    path = DevPath(f"char/{NVIDIA}:0")
    plan = make_plan(facts(entries={**READY, path: OtherFile("a regular file")}))
    assert plan.actions == ()
    assert only_finding(plan).path == f"/dev/{path}"


@pytest.mark.parametrize("entry", [Symlink("/tmp"), OtherFile("a regular file")], ids=str)
def test_a_folder_that_is_none_is_one_finding(entry: DevEntry) -> None:
    kept = {path: found for path, found in READY.items() if not path.startswith("char")}
    plan = make_plan(facts(entries={**kept, DevPath("char"): entry}))
    assert plan.actions == ()
    assert only_finding(plan).path == "/dev/char"


@pytest.mark.parametrize("entry", [Symlink("/tmp"), OtherFile("a regular file")], ids=str)
def test_nothing_is_made_in_what_is_no_folder(entry: DevEntry) -> None:
    capabilities = {**mig("gpu0/mig/gi1/access", 12), **mig("gpu0/mig/gi1/ci0/access", 13)}
    plan = make_plan(facts(capabilities=capabilities, entries=dev(nvidia_caps=entry)))
    assert plan.actions == ()
    assert only_finding(plan).path == "/dev/nvidia-caps"


def test_the_administrators_nodes_are_never_made() -> None:
    entries = dev("nvidia0", f"char/{NVIDIA}:0", nvidia_uvm=root(OLD_UVM, 0))
    plan = make_plan(facts(params=params(modify=0), entries=entries))
    assert plan.actions == ()
    assert [finding.path for finding in plan.findings] == ["/dev/nvidia0", "/dev/nvidia-uvm"]
    assert "ModifyDeviceFiles: 0" in plan.findings[0].reason
    assert plan.findings[0].reason.endswith(f": mknod -m 0666 /dev/nvidia0 c {NVIDIA} 0")
    assert plan.findings[1].reason.endswith(f": rm /dev/nvidia-uvm; mknod -m 0666 /dev/nvidia-uvm c {UVM} 0")


def test_the_administrators_choice_of_mode_is_no_finding() -> None:
    plan = make_plan(facts(params=params(modify=0), entries=dev(nvidia0=CharDevice(NVIDIA, 0, 0o660, 0, 44))))
    assert plan == HostPlan()


def test_the_administrators_nodes_get_links() -> None:
    plan = make_plan(facts(params=params(modify=0), entries=dev(f"char/{NVIDIA}:0")))
    assert plan == HostPlan((MakeLink(DevPath(f"char/{NVIDIA}:0"), "../nvidia0"),))


def test_unclear_parameters_stop_all_nodes() -> None:
    plan = make_plan(facts(params=params(mode=666), entries={}))
    assert plan.actions == ()
    assert only_finding(plan).path == "/proc/driver/nvidia/params"
    unread = Finding("/proc/driver/nvidia/params", "cannot be read: Input/output error")
    assert make_plan(facts(params="", entries={}, unreadable=(unread,))) == HostPlan((), (unread,))


def test_the_nodes_of_mig_instances() -> None:
    capabilities = {**mig("gpu0/mig/gi1/access", 12), **mig("gpu0/mig/gi1/ci0/access", 13, mode=0o440)}
    table = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi2/access 21\n"
    plan = make_plan(facts(capabilities=capabilities, mig_minors=table))
    assert not plan.findings
    assert [action for action in plan.actions if isinstance(action, MakeNode)] == [
        MakeNode(DevPath("nvidia-caps/nvidia-cap12"), root(CAPS, 12, 0o444)),
        MakeNode(DevPath("nvidia-caps/nvidia-cap13"), root(CAPS, 13, 0o440)),
    ]


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
    assert words in only_finding(plan).reason
    assert all("gi2" not in str(action) for action in plan.actions)


FAULTY_GPUS = {
    "no minor": ({address(0): "Model: x\n"}, f"{address(0)}/information"),
    "two GPUs, one minor": ({address(0): information(0), address(1): information(0)}, f"{address(1)}/information"),
    "a driver that serves none": ({}, "/proc/driver/nvidia/gpus"),
}


@pytest.mark.parametrize(("gpus", "path"), FAULTY_GPUS.values(), ids=FAULTY_GPUS)
def test_a_gpu_without_a_node(gpus: dict[str, str], path: str) -> None:
    plan = make_plan(facts(gpus=gpus))
    assert plan.actions == ()
    assert only_finding(plan).path.endswith(path)


def test_an_excluded_gpu_has_no_node() -> None:
    gpus = {address(0): information(0), address(1): information(1, excluded="Yes")}
    assert make_plan(facts(gpus=gpus)) == HostPlan()


@pytest.mark.parametrize(
    ("majors", "name"),
    [
        (Majors(None, UVM, CAPS), "nvidia "),
        (Majors(NVIDIA, None, CAPS), "nvidia-uvm "),
        (Majors(NVIDIA, UVM), "-caps "),
    ],
)
def test_a_module_without_its_major(majors: Majors, name: str) -> None:
    plan = make_plan(facts(majors=majors, capabilities=mig("gpu0/mig/gi1/access", 12)))
    (finding,) = (finding for finding in plan.findings if finding.path == "/proc/devices")
    assert name in finding.reason
