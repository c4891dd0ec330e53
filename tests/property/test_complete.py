"""Law: a container with another component's GPUs has the same ones after us, whatever it asks and policy says.

What is added to it is no node of a GPU and no right to a MIG device, and its environment names what it holds.
"""

from __future__ import annotations

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from nri_gpu.decision.decide import decide
from nri_gpu.decision.foreign import external_units, external_uuids
from nri_gpu.domain.container import Container, DeviceRef
from nri_gpu.domain.decision import Inject
from nri_gpu.domain.edits import Edits
from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.node import Node
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import ClaimDefaults, Complete, ForeignSettings, Policy
from tests.property import strategies
from tests.support import builders as make

SHARED = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}


@st.composite
def holding(draw: st.DrawFn, node: Node) -> tuple[DeviceRef, ...]:
    """What a device plugin may have put into a container of this node."""
    majors = node.inventory.majors
    found: list[DeviceRef] = [DeviceRef("/dev/nvidiactl", majors.nvidia or 195, 255)] * draw(st.integers(0, 1))
    for gpu in draw(st.lists(st.sampled_from(node.gpus), unique=True, min_size=1, max_size=3)) if node.gpus else ():
        found.append(make.held_node(gpu))
        found += _caps(draw, gpu)
    return tuple(found)


def _caps(draw: st.DrawFn, gpu: Gpu) -> list[DeviceRef]:
    parts = draw(st.lists(st.sampled_from(gpu.mig), unique=True)) if gpu.mig else []
    minors = [minor for part in parts for minor in (part.gpu_instance_minor, part.compute_instance_minor) if minor]
    return [DeviceRef(f"/dev/nvidia-caps/nvidia-cap{minor}", 510, minor) for minor in minors]


@st.composite
def served(draw: st.DrawFn) -> tuple[Container, Node]:
    node = draw(st.just(make.node(staged=strategies.DRIVER)) | strategies.nodes)
    container = draw(strategies.containers())
    devices = draw(holding(node))
    asked = draw(st.sampled_from([{}, {}, {make.KEY: "all"}]) | strategies.claims.map(lambda claim: {make.KEY: claim}))
    of = make.pod(container.pod.name, annotations=asked)
    return make.container(of=of, mounts=container.mounts, devices=devices, env=container.env), node


policies = st.builds(
    Policy,
    foreign=st.builds(ForeignSettings, complete=st.sampled_from([Complete.ALL, *Complete])),
    defaults=st.builds(ClaimDefaults, capabilities=st.sampled_from([*strategies.SOME, strategies.DRAWING])),
)


@settings(max_examples=150)
@given(served(), policies)
def test_the_same_gpus_before_and_after(served: tuple[Container, Node], policy: Policy) -> None:
    container, node = served
    before = external_uuids(container, node)
    assume(before)
    decision = decide(container, node, Ledger(), policy)
    edits = Edits() if not isinstance(decision, Inject) else decision.edits
    after = Container(
        id=container.id,
        name=container.name,
        pod=container.pod,
        devices=(
            *container.devices,
            *(DeviceRef(each.path, each.major, each.minor) for each in edits.devices.values()),
        ),
    )
    assert external_uuids(after, node) == before
    assert external_units(after, node) == external_units(container, node)
    assert edits.devices.keys() <= SHARED - {device.path for device in container.devices}
    if not isinstance(decision, Inject):
        return
    event("completed" if decision.completes else "none")
    assert not decision.grant.uuids
    if decision.completes:
        assert policy.foreign.complete is not Complete.NONE
        assert set(decision.completes) <= before
        assert edits.env["NVIDIA_VISIBLE_DEVICES"].split(",") == list(decision.completes)
        assert "/dev/nvidiactl" in {*edits.devices, *(device.path for device in container.devices)}
