"""Law: a reply names no hook and nothing twice, gives nodes of the grant alone, and mounts the staged driver alone.

Asked of the bytes that go to the runtime, whatever the container, the node, the ledger and the policy are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from hypothesis import event, given, settings

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.grant import SignedGrant, verify_grant
from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.container import Container
from nri_gpu.domain.gpu import Gpu, MigPart, Unit, whole
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import Node
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.policy.model import Policy
from nri_gpu.system.state import NodeState
from tests.property import worlds
from tests.support import builders as make
from tests.support.no_recorder import NoRecorder

KEY: Final = bytes(range(32))
CTL, MODESET = 255, 254  # minors of the driver's own major
KERNEL: Final = ("/proc", "/sys", "/dev")
MPS_FOLDERS = {"pipe": "ro", "shm": "rw"}
READ_ONLY: Final = {"ro", "nosuid", "nodev"}


def reply_to(container: Container, node: Node, ledger: Ledger, policy: Policy) -> pb.CreateContainerResponse:
    """What goes to the runtime; empty for a refusal, which is no message."""
    state = NodeState(node.inventory, policy=policy)
    state.node, state.ledger = node, ledger.released(container.id)
    plugin = Plugin(state, PluginDependencies(lambda: 0.0, lambda _: None, NoRecorder()), KEY)
    reply = plugin.create_container(make.create_payload(container))
    event("bytes" if isinstance(reply, bytes) and reply else "nothing")
    return pb.CreateContainerResponse.FromString(reply if isinstance(reply, bytes) else b"")


def granted(reply: pb.CreateContainerResponse, container: Container, node: Node) -> tuple[Unit, ...]:
    """The GPUs and MIG devices that the mark names."""
    text = reply.adjust.annotations.get(GRANT_KEY)
    if text is None:
        return ()
    mark = verify_grant(text, container.pod.uid, container.id, KEY)
    assert isinstance(mark, SignedGrant)
    return tuple(unit for unit in node.inventory.units if unit.uuid in mark.uuids)


def allowed(units: Iterable[Unit], node: Node) -> Iterator[tuple[int | None, int | None]]:
    """Numbers of nodes: the GPUs', those that all of them share, and of MIG devices their two capabilities'."""
    majors = node.inventory.majors
    for unit in units:
        yield from ((majors.nvidia, minor) for minor in (whole(unit).minor_number, CTL, MODESET))
        yield from ((majors.nvidia_uvm, minor) for minor in (0, 1))
        if isinstance(unit, Gpu):
            yield from ((drm.major, drm.minor) for drm in unit.drm)
        if isinstance(unit, MigPart):
            device = unit.device
            yield majors.nvidia_caps, device.gpu_instance_minor
            yield majors.nvidia_caps, device.compute_instance_minor


def of_extras(node: Node) -> Iterator[tuple[int, int]]:
    """Numbers of what the node offers beside GPUs, which policy may let a container ask for."""
    for offer in node.inventory.extras.values():
        yield from ((each.major, each.minor) for each in offer.nodes)
        if offer.channels:
            yield from ((offer.channels.major, number) for number in range(offer.channels.count))


def sources(node: Node) -> Iterator[str]:
    """Folders and files of the host that may be mounted."""
    yield from (tree.path for tree in node.driver.trees.values()) if node.driver else ()
    yield from (package.path for package in node.compat)
    yield from (each.source for offer in node.inventory.extras.values() for each in offer.mounts)
    if node.profiles:
        yield node.profiles.folder


def shared(node: Node) -> set[tuple[int | None, int]]:
    """Numbers of the nodes that give no GPU: what a container is completed with that has GPUs by others' hand."""
    majors = node.inventory.majors
    return {(majors.nvidia, CTL), (majors.nvidia, MODESET), (majors.nvidia_uvm, 0), (majors.nvidia_uvm, 1)}


def within(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


@settings(max_examples=300)
@given(worlds.containers(), worlds.nodes, worlds.ledgers, worlds.policies)
def test_there_is_no_hook_and_nothing_that_could_bring_one(
    container: Container, node: Node, ledger: Ledger, policy: Policy
) -> None:
    reply = reply_to(container, node, ledger, policy)
    assert not reply.adjust.HasField("hooks")
    assert not reply.adjust.CDI_devices
    assert not reply.update
    assert not reply.evict


@settings(max_examples=300)
@given(worlds.containers(), worlds.nodes, worlds.ledgers, worlds.policies)
def test_nothing_is_named_twice(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    """To a runtime a second one is a conflict with ourselves."""
    adjust = reply_to(container, node, ledger, policy).adjust
    for names in (
        [each.path for each in adjust.linux.devices],
        [each.destination for each in adjust.mounts],
        [each.key for each in adjust.env],
    ):
        assert len(set(names)) == len(names)
        assert all(names)


@settings(max_examples=300)
@given(worlds.containers(), worlds.nodes, worlds.ledgers, worlds.policies)
def test_every_node_is_the_grants_or_shared(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    reply = reply_to(container, node, ledger, policy)
    units = granted(reply, container, node)
    devices = reply.adjust.linux.devices
    numbers = {(each.major, each.minor) for each in devices}
    assert numbers <= (set(allowed(units, node)) | set(of_extras(node)) if units else shared(node))
    assert bool(devices) >= bool(units)
    assert all(each.type == "c" and within(each.path, "/dev") and ".." not in each.path for each in devices)


@settings(max_examples=1500)  # only some answers have mounts
@given(worlds.containers(), worlds.nodes, worlds.ledgers, worlds.policies)
def test_every_mount_is_of_the_staged_driver(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    reply = reply_to(container, node, ledger, policy)
    units = {unit.uuid for unit in granted(reply, container, node)}
    for mount in reply.adjust.mounts:
        if within(mount.source, node.mps.base):  # a client of MPS writes to its daemon's memory, and to no other's
            right = {f"{node.mps.folder(uuid)}/{name}": right for uuid in units for name, right in MPS_FOLDERS.items()}
            assert set(mount.options) == {"rbind", "rprivate", "nosuid", "nodev", "noexec", right[mount.source]}
            continue
        assert any(within(mount.source, source) for source in sources(node))
        assert not any(within(mount.destination, folder) for folder in KERNEL)
        assert mount.destination.startswith("/")
        assert ".." not in mount.source + mount.destination
        assert set(mount.options) >= READ_ONLY
        assert mount.type == "bind"


@settings(max_examples=300)
@given(worlds.containers(), worlds.nodes, worlds.ledgers, worlds.policies)
def test_the_loaders_path_only_grows_in_front(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    """To the loader an empty element is the current directory; whoever had none before has none now."""
    for pair in reply_to(container, node, ledger, policy).adjust.env:
        if pair.key == "LD_LIBRARY_PATH":
            before = container.env.get("LD_LIBRARY_PATH", "")
            assert pair.value.endswith(before)
            added = pair.value.removesuffix(before).removesuffix(":").split(":")
            assert all(folder.startswith("/") for folder in added)
