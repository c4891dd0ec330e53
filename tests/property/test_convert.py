"""Law: what a runtime sends is read as it was meant, what we answer says the edits, `may_concern` overlooks nothing.

It would overlook a request that it says concerns nobody although decoding it leads to more than a plain pass.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.decision.asked import needs_grant, reads_environment
from nri_gpu.decision.decide import decide
from nri_gpu.decision.foreign import external_uuids
from nri_gpu.domain.container import Container, DeviceRef
from nri_gpu.domain.decision import Pass
from nri_gpu.domain.edits import NO_EDITS, DeviceNode, Edits, Mount, Rlimit
from nri_gpu.domain.node import Majors, Node
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.nri.convert import PREFIX, READ_ENV, may_concern, reply_to_pb, request_from_pb
from nri_gpu.nri.session import Parts
from nri_gpu.nri.subscription import Lifecycle
from nri_gpu.policy.model import Policy
from nri_gpu.request.image_requirements import PREFIX as PREFIX_OF_REQUIREMENTS
from nri_gpu.request.image_requirements import concerns
from tests.property import strategies
from tests.support import builders as make


def as_read(container: Container) -> Container:
    """With what `convert` keeps."""
    pod = replace(
        container.pod, annotations={k: v for k, v in container.pod.annotations.items() if k.startswith(PREFIX)}
    )
    return replace(
        container,
        pod=pod,
        annotations={k: v for k, v in container.annotations.items() if k.startswith(PREFIX)},
        env={k: v for k, v in container.env.items() if k in READ_ENV or concerns(k)},
        requirement_chars=sum(
            len(k) + len(v) for k, v in container.env.items() if k.startswith(PREFIX_OF_REQUIREMENTS) and concerns(k)
        ),
    )


@given(strategies.containers())
def test_a_request_is_read_as_it_was_meant(container: Container) -> None:
    assert request_from_pb(make.create_payload(container)) == as_read(container)


@given(strategies.containers())
def test_an_event_is_read_alike_by_either_way(container: Container) -> None:
    pod, message = make.pod_message(container.pod), make.container_message(container)
    own = pb.StopContainerRequest(pod=pod, container=message).SerializeToString()
    change = pb.StateChangeEvent(event=pb.STOP_CONTAINER, pod=pod, container=message).SerializeToString()
    for read in (Lifecycle(own, pb.STOP_CONTAINER), Lifecycle(change)):
        assert (read.pod_id, read.container_id) == (container.pod.id, container.id)
        assert read.container == as_read(container)


@given(strategies.edits(strategies.texts))
def test_a_reply_says_the_edits(whole: Edits) -> None:
    adjust = pb.CreateContainerResponse.FromString(reply_to_pb(whole)).adjust
    read = Edits.of(
        devices=tuple(
            DeviceNode(d.path, d.major, d.minor, d.file_mode.value, d.uid.value, d.gid.value)
            for d in adjust.linux.devices
        ),
        mounts=tuple(Mount(m.destination, m.source, tuple(m.options)) for m in adjust.mounts),
        env={pair.key: pair.value for pair in adjust.env},
        rlimits=tuple(Rlimit(limit.type, limit.hard, limit.soft) for limit in adjust.rlimits),
        cpuset_cpus=adjust.linux.resources.cpu.cpus,
        cpuset_mems=adjust.linux.resources.cpu.mems,
    )
    assert read == whole
    assert all(device.HasField("file_mode") and device.HasField("gid") for device in adjust.linux.devices)
    assert adjust.linux.HasField("resources") is bool(whole.cpuset_cpus or whole.cpuset_mems)
    assert not adjust.linux.resources.cpu.HasField("shares")


@given(strategies.edits(strategies.texts))
def test_what_a_container_has_already_is_removed_for_ours(whole: Edits) -> None:
    """Else the runtime refuses it, if a plugin before us added it."""
    has = make.container(
        env=dict.fromkeys(whole.env, ""),
        mounts=frozenset(whole.mounts),
        devices=tuple(DeviceRef(path, 0, 0) for path in whole.devices),
    )
    adjust = pb.CreateContainerResponse.FromString(reply_to_pb(whole, has)).adjust
    for ours, said in (
        (whole.env, [each.key for each in adjust.env]),
        (whole.mounts, [each.destination for each in adjust.mounts]),
        (whole.devices, [each.path for each in adjust.linux.devices]),
    ):
        assert said[: len(ours)] == [f"-{name}" for name in sorted(ours)]
        assert sorted(said[len(ours) :]) == sorted(ours)


@given(st.lists(strategies.containers(), max_size=5), st.lists(st.integers(0, 4), max_size=5))
def test_however_a_synchronize_is_cut_it_lists_the_same(containers: list[Container], cuts: list[int]) -> None:
    pods = [make.pod_message(c.pod, id=f"{c.pod.id}-{n}") for n, c in enumerate(containers)]
    made = [make.container_message(c, id=f"c{n}", pod_sandbox_id=f"{c.pod.id}-{n}") for n, c in enumerate(containers)]
    borders = sorted({0, len(made), *(cut for cut in cuts if cut < len(made))})
    parts = Parts()
    for start, end in pairwise(borders):
        assert parts.add(pb.SynchronizeRequest(containers=made[start:end], more=True).SerializeToString())
    assert not parts.add(pb.SynchronizeRequest(pods=pods).SerializeToString())
    whole = Parts()
    whole.add(pb.SynchronizeRequest(pods=pods, containers=made).SerializeToString())
    assert parts.listed() == whole.listed()


@settings(max_examples=100)
@given(strategies.containers(), strategies.nodes, strategies.policies, st.integers(1, 2**20), st.booleans())
def test_no_request_that_concerns_us_is_overlooked(
    container: Container, node: Node, policy: Policy, major: int, quiet: bool
) -> None:
    if quiet:
        container = replace(container, pod=replace(container.pod, annotations={}), annotations={})
    if node.inventory.majors.nvidia:
        node = replace(node, inventory=replace(node.inventory, majors=Majors(major, 511)))
        moved = tuple(replace(each, major=major) if each.major == 195 else each for each in container.devices)
        container = replace(container, devices=moved)
    payload = make.create_payload(container)
    read = request_from_pb(payload)
    decision = decide(read, node, Ledger(), policy)
    plain = isinstance(decision, Pass) and decision.edits == NO_EDITS
    found = may_concern(payload, node.inventory.majors.nvidia, environment=reads_environment(policy))
    event(f"plain: {plain}, found: {found}")
    assert found or (plain and not external_uuids(read, node) and not needs_grant(read, policy))
