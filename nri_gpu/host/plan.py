"""Plans the actions that prepare this host, from what the driver reports. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from msgspec import Struct

from nri_gpu.host.facts import (
    CAPS,
    CHAR,
    Action,
    CharDevice,
    DevEntry,
    DevPath,
    Directory,
    Finding,
    FixNode,
    HostError,
    HostFacts,
    KernelModule,
    LoadModule,
    MakeLink,
    MakeNode,
    Symlink,
)
from nri_gpu.host.look import Ownership, capability, gpu_minor, minors_table, params_ownership, table_name

PARAMS: Final = "/proc/driver/nvidia/params"
GPUS: Final = "/proc/driver/nvidia/gpus"
CAPABILITIES: Final = "/proc/driver/nvidia/capabilities"

# Fixed. NVIDIA/open-gpu-kernel-modules kernel-open/common/inc/nv-chardev-numbers.h; uvm's are its first two.
_MODESET_MINOR: Final = 254
_CONTROL_MINOR: Final = 255


class WantedNode(Struct, frozen=True):
    """One node that should exist. hands_off: why we must not make or change it; empty where we may."""

    path: DevPath
    node: CharDevice
    hands_off: str = ""


def wanted_nodes(facts: HostFacts, graphics: bool) -> Iterator[WantedNode | Finding]:
    """The nodes that the loaded modules serve, and what keeps us from knowing them.

    Without a readable `params` no node is wanted at all: it may forbid us to make any.
    """
    if any(finding.path == PARAMS for finding in facts.unreadable):
        return
    try:
        ownership = params_ownership(facts.params)
    except HostError as error:
        yield Finding(PARAMS, f"{error}; until then no device node is made or changed")
        return
    kept = "" if ownership.modify else f"{PARAMS} has ModifyDeviceFiles: 0, so the administrator makes device nodes"
    if KernelModule.NVIDIA in facts.modules:
        yield from _nvidia_nodes(facts, ownership, kept, graphics)
    if KernelModule.UVM in facts.modules:
        yield from _uvm_nodes(facts, kept)
    if facts.capabilities:
        yield from _mig_nodes(facts, kept)


def _nvidia_nodes(facts: HostFacts, ownership: Ownership, kept: str, graphics: bool) -> Iterator[WantedNode | Finding]:
    major = facts.majors.nvidia
    if major is None:
        yield _unlisted("nvidia")
        return

    def node(minor: int) -> CharDevice:
        return CharDevice(major, minor, ownership.mode, ownership.uid, ownership.gid)

    yield WantedNode(DevPath("nvidiactl"), node(_CONTROL_MINOR), kept)
    for each in _gpu_minors(facts):
        yield each if isinstance(each, Finding) else WantedNode(DevPath(f"nvidia{each}"), node(each), kept)
    if graphics and KernelModule.MODESET in facts.modules:
        yield WantedNode(DevPath("nvidia-modeset"), node(_MODESET_MINOR), kept)


def _gpu_minors(facts: HostFacts) -> Iterator[int | Finding]:
    seen: dict[int, str] = {}
    for address, information in sorted(facts.gpus.items()):
        path = f"{GPUS}/{address}/information"
        try:
            minor = gpu_minor(information)
        except HostError as error:
            yield Finding(path, str(error))
            continue
        if minor is None:
            continue  # excluded by the administrator
        if minor in seen:
            yield Finding(path, f"has minor {minor} like {seen[minor]}: reload the driver")
            continue
        seen[minor] = address
        yield minor
    if not facts.gpus and not any(finding.path.startswith(GPUS) for finding in facts.unreadable):
        yield Finding(
            GPUS, f"the driver is loaded, and serves none of {', '.join(facts.devices)}: see the kernel's log"
        )


def _uvm_nodes(facts: HostFacts, kept: str) -> Iterator[WantedNode | Finding]:
    """The module has no parameters for owner or mode, and every CUDA program needs the nodes."""
    major = facts.majors.nvidia_uvm
    if major is None:
        yield _unlisted("nvidia-uvm")
        return
    for minor, name in enumerate(("nvidia-uvm", "nvidia-uvm-tools")):
        yield WantedNode(DevPath(name), CharDevice(major, minor, 0o666, 0, 0), kept)


def _mig_nodes(facts: HostFacts, kept: str) -> Iterator[WantedNode | Finding]:
    """Only MIG instances: root's tools make the nodes of the capabilities to configure and to monitor."""
    major = facts.majors.nvidia_caps
    if major is None:
        yield _unlisted("nvidia-caps")
        return
    table = minors_table(facts.mig_minors)
    seen: dict[int, str] = {}
    for name, text in sorted(facts.capabilities.items()):
        path = f"{CAPABILITIES}/{name}"
        try:
            found = capability(text)
        except HostError as error:
            yield Finding(path, str(error))
            continue
        listed = table.get(table_name(name), found.minor)
        if found.minor in seen or listed != found.minor:
            rival = f"mig-minors has {listed}" if listed != found.minor else f"so has {seen[found.minor]}"
            yield Finding(path, f"has minor {found.minor}, but {rival}: reload the driver")
            continue
        seen[found.minor] = name
        own = found.ownership
        off = kept or ("" if own.modify else f"{path} has DeviceFileModify: 0, so the administrator makes the node")
        node = CharDevice(major, found.minor, own.mode, own.uid, own.gid)
        yield WantedNode(DevPath(f"{CAPS}/nvidia-cap{found.minor}"), node, off)


def _unlisted(name: str) -> Finding:
    return Finding("/proc/devices", f"{name} is in use, but has no major here: reload the driver")


_ALWAYS: Final = (KernelModule.NVIDIA, KernelModule.UVM)


class HostPlan(Struct, frozen=True):
    """Actions in the order to perform them. findings: what only the administrator can fix."""

    actions: tuple[Action, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def more_may_follow(self) -> bool:
        """Whether more actions may follow: which devices a module serves is known once it is loaded."""
        return any(isinstance(action, LoadModule) for action in self.actions)


def make_plan(facts: HostFacts, *, graphics: bool = False) -> HostPlan:
    """Modules first, then nodes, each with its link. Nothing on a machine without an NVIDIA device.

    graphics: also nvidia-modeset.
    """
    if not facts.devices:
        return HostPlan((), facts.unreadable)
    steps: list[Action | Finding] = [*facts.unreadable, *_modules(facts, graphics)]
    for each in wanted_nodes(facts, graphics):
        steps += [each] if isinstance(each, Finding) else _for_node(each, facts.entries)
    return HostPlan(
        tuple(step for step in steps if not isinstance(step, Finding)),
        tuple(dict.fromkeys(step for step in steps if isinstance(step, Finding))),
    )


def _modules(facts: HostFacts, graphics: bool) -> Iterator[LoadModule]:
    needed = (*_ALWAYS, KernelModule.MODESET) if graphics else _ALWAYS
    return (LoadModule(module) for module in needed if module not in facts.modules)


def _for_node(wanted: WantedNode, entries: Mapping[DevPath, DevEntry]) -> list[Action | Finding]:
    """A node and its link; no link to a node that is wrong and stays so."""
    step = _node(wanted, entries)
    link = None if isinstance(step, Finding) else _link(wanted, entries)
    return [each for each in (step, link) if each is not None]


def _node(wanted: WantedNode, entries: Mapping[DevPath, DevEntry]) -> Action | Finding | None:
    blocked = _blocked(DevPath(str(PurePosixPath(wanted.path).parent)), entries)
    if blocked:
        return blocked
    there = entries.get(wanted.path)
    if there is not None and not isinstance(there, CharDevice):
        return Finding(f"/dev/{wanted.path}", f"is {there}, where {wanted.node} belongs: remove it")
    if there is None or there.number != wanted.node.number:
        if wanted.hands_off:
            return Finding(f"/dev/{wanted.path}", _missing(wanted, there))
        return MakeNode(wanted.path, wanted.node, there)
    # If the administrator makes the nodes, mode and owner are theirs to choose.
    return None if there == wanted.node or wanted.hands_off else FixNode(wanted.path, wanted.node, there)


def _link(wanted: WantedNode, entries: Mapping[DevPath, DevEntry]) -> Action | Finding | None:
    """/dev/char/MAJOR:MINOR, which udev makes only for devices in sysfs, and NVIDIA's are not there.

    runc 1.1.3 to 1.1.6 and systemd before 240 need it (opencontainers/runc issues 3708 and 3567): without it a
    container loses its GPU at the next `systemctl daemon-reload`.
    """
    blocked = _blocked(CHAR, entries)
    if blocked:
        return blocked
    path = DevPath(f"{CHAR}/{wanted.node.major}:{wanted.node.minor}")
    target = f"../{wanted.path}"
    there = entries.get(path)
    if there is not None and not isinstance(there, Symlink):
        return Finding(f"/dev/{path}", f"is {there}, where a link to {target} belongs: remove it")
    if there is not None and there.target in (target, f"/dev/{wanted.path}"):  # nvidia-ctk writes the second
        return None
    return MakeLink(path, target, there.target if there else None)


def _blocked(folder: DevPath, entries: Mapping[DevPath, DevEntry]) -> Finding | None:
    there = entries.get(folder)
    if str(folder) == "." or there is None or isinstance(there, Directory):
        return None
    return Finding(f"/dev/{folder}", f"is {there}, where a directory belongs: remove it")


def _missing(wanted: WantedNode, there: CharDevice | None) -> str:
    """What the administrator has to do, with the command to type."""
    state = f"is {there}" if there else "is missing"
    node, path = wanted.node, f"/dev/{wanted.path}"
    command = f"mknod -m {node.mode:04o} {path} c {node.major} {node.minor}"
    return f"{state} and should be {node}, but {wanted.hands_off}: {f'rm {path}; ' if there else ''}{command}"
