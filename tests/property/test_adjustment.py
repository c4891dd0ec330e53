"""Law: a reply names no hook and nothing twice, gives nodes of the grant alone, and mounts the staged driver alone.

Asked of the bytes that go to the runtime, whatever the container, the node, the ledger and the policy are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.decision.refusals import why_not
from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import Extra
from nri_gpu.domain.gpu import Gpu, MigPart, Unit, whole
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.domain.node import Node
from nri_gpu.ledger.grant_text import SignedGrant, verify_grant
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.policy.model import ExtraRules, Policy
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.system.state import NodeState
from tests.property import strategies
from tests.support import builders as make
from tests.support.plugin import NoRecorder

KEY: Final = bytes(range(32))
CTL, MODESET = 255, 254  # minors of the driver's own major
KERNEL: Final = ("/proc", "/sys", "/dev")
MPS_FOLDERS = {"pipe": "ro", "shm": "rw"}
READ_ONLY: Final = {"ro", "nosuid", "nodev"}


def reply_to(container: Container, node: Node, ledger: Ledger, policy: Policy) -> pb.CreateContainerResponse:
    """What goes to the runtime; empty for a refusal, which is no message."""
    state = NodeState(node.inventory, policy=policy, later=lambda _: None)
    state.node, state.ledger = node, ledger.without_containers({container.id})
    plugin = Plugin(state, PluginDependencies(lambda: 0.0, lambda _: None, NoRecorder()), KEY)
    reply = plugin.create_container(make.create_payload(container))
    return pb.CreateContainerResponse.FromString(reply if isinstance(reply, bytes) else b"")


def granted(reply: pb.CreateContainerResponse, container: Container, node: Node) -> tuple[Unit, ...]:
    """The GPUs and MIG devices that the signed grant names."""
    text = reply.adjust.annotations.get(GRANT_KEY)
    if text is None:
        return ()
    signed = verify_grant(text, container.pod.uid, container.id, KEY)
    assert isinstance(signed, SignedGrant)
    return tuple(unit for unit in node.inventory.units if unit.uuid in signed.uuids)


def own(units: Iterable[Unit], node: Node) -> Iterator[tuple[int | None, int | None]]:
    """Numbers of the nodes without which a grant is of no use: the GPUs', and of MIG devices their capabilities'."""
    majors = node.inventory.majors
    for unit in units:
        yield majors.nvidia, whole(unit).minor_number
        if isinstance(unit, MigPart):
            yield majors.nvidia_caps, unit.device.gpu_instance_minor
            yield majors.nvidia_caps, unit.device.compute_instance_minor


def drawn(units: Iterable[Unit]) -> Iterator[tuple[int, int]]:
    """Numbers of the nodes that draw on whole GPUs."""
    yield from ((drm.major, drm.minor) for unit in units if isinstance(unit, Gpu) for drm in unit.drm)


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


def shared(node: Node) -> set[tuple[int | None, int]]:
    """Numbers of the nodes that give no GPU: with those a container of another component's GPUs is completed."""
    majors = node.inventory.majors
    return {(majors.nvidia, CTL), (majors.nvidia, MODESET), (majors.nvidia_uvm, 0), (majors.nvidia_uvm, 1)}


def within(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def removes(name: str) -> bool:
    """Whether it takes away what a plugin before us added, for ours to take its place."""
    return name.startswith("-")


def there_is_no_hook_and_nothing_that_could_bring_one(
    reply: pb.CreateContainerResponse, container: Container, node: Node
) -> None:
    assert not reply.adjust.HasField("hooks")
    assert not reply.adjust.CDI_devices
    assert not reply.update
    assert not reply.evict


def nothing_is_named_twice(reply: pb.CreateContainerResponse, container: Container, node: Node) -> None:
    """To a runtime a second one is a conflict with ourselves."""
    adjust = reply.adjust
    for names in (
        [each.path for each in adjust.linux.devices],
        [each.destination for each in adjust.mounts],
        [each.key for each in adjust.env],
    ):
        assert len(set(names)) == len(names)
        assert all(names)


def every_node_is_the_grants_or_shared(reply: pb.CreateContainerResponse, container: Container, node: Node) -> None:
    units = granted(reply, container, node)
    devices = [each for each in reply.adjust.linux.devices if not removes(each.path)]
    numbers = {(each.major, each.minor) for each in devices}
    assert set(own(units, node)) <= numbers
    assert numbers <= {*own(units, node), *drawn(units), *(of_extras(node) if units else ()), *shared(node)}
    assert not [unit for unit in units if why_not(unit)]
    assert all(each.type == "c" and within(each.path, "/dev") and ".." not in each.path for each in devices)


def every_mount_is_of_the_staged_driver(reply: pb.CreateContainerResponse, container: Container, node: Node) -> None:
    units = {unit.uuid for unit in granted(reply, container, node)}
    for mount in (each for each in reply.adjust.mounts if not removes(each.destination)):
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


def the_loaders_path_only_grows_in_front(reply: pb.CreateContainerResponse, container: Container, node: Node) -> None:
    """To the loader an empty element is the current directory; whoever had none before has none now."""
    for pair in reply.adjust.env:
        if pair.key == "LD_LIBRARY_PATH":
            before = container.env.get("LD_LIBRARY_PATH", "")
            assert pair.value.endswith(before)
            added = pair.value.removesuffix(before).removesuffix(":").split(":")
            assert all(folder.startswith("/") for folder in added)


LAWS = (
    granted,
    there_is_no_hook_and_nothing_that_could_bring_one,
    nothing_is_named_twice,
    every_node_is_the_grants_or_shared,
    every_mount_is_of_the_staged_driver,
    the_loaders_path_only_grows_in_front,
)
# Half of the examples are mostly granted, so that there is something to check.
ASKING = st.builds(
    lambda of, claim: replace(
        of, pod=replace(of.pod, namespace="ml", annotations={make.KEY: claim}), annotations={}, devices=()
    ),
    strategies.containers(),
    strategies.claims,
)
READY = make.node(staged=strategies.DRIVER, extras=strategies.OFFERS)
GENEROUS = Policy(extras=ExtraRules(allowed=frozenset(Extra)), mps=MpsSettings(enabled=True))


@settings(max_examples=150)
@given(
    st.one_of(ASKING, ASKING, strategies.containers()),
    st.one_of(st.just(READY), st.just(READY), strategies.nodes),
    st.just(Ledger()) | strategies.ledgers,
    st.one_of(st.just(GENEROUS), st.just(GENEROUS), strategies.policies),
)
def test_every_law(container: Container, node: Node, ledger: Ledger, policy: Policy) -> None:
    reply = reply_to(container, node, ledger, policy)
    event("mounts" if reply.adjust.mounts else "no mount")
    for law in LAWS:
        law(reply, container, node)
