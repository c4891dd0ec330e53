"""Law: extras are given whole and by policy alone, or the container is refused; who asks for none gets none."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from nri_gpu.decision.decide import decide
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Inject
from nri_gpu.domain.edits import NO_EXTRAS, Edits, Extra, Extras
from nri_gpu.domain.gpu import DrmNode, MigPart, whole
from nri_gpu.domain.node import Node
from nri_gpu.injection.extra_edits import CHANNELS_FOLDER, MEMLOCK
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import ExtraRules, Policy
from nri_gpu.request.annotation import parse_claim, select_annotation
from tests.property import strategies
from tests.support import builders as make

# What a decision can show of each; of drm it depends on the GPUs.
ALL_NODES = {extra: {node.path for node in offer.nodes} for extra, offer in strategies.OFFERS.items()}
ALL_MOUNTS = {extra: {mount.destination for mount in offer.mounts} for extra, offer in strategies.OFFERS.items()}


def asked(container: Container) -> Extras:
    found = select_annotation(container.pod.annotations, container.annotations, container.name)
    return parse_claim(*found).extras if found else NO_EXTRAS


def seen(edits: Edits) -> set[Extra]:
    """Of which extras there is anything, be it one node."""
    found = {extra for extra, paths in ALL_NODES.items() if paths & edits.devices.keys()}
    found |= {extra for extra, places in ALL_MOUNTS.items() if places & edits.mounts.keys()}
    found |= {Extra.IMEX} if any(path.startswith(CHANNELS_FOLDER) for path in edits.devices) else set()
    found |= {Extra.RDMA} if edits.rlimits else set()
    return found


drawing = st.sampled_from(["", ";capabilities=graphics,compute"])
words = ["drm", "gds", "rdma", "profile", "mig-config", "imex:0", "imex:7"]
lacking = st.sampled_from(["gdrcopy", "nvswitch", "imex:8"])
had = st.lists(st.sampled_from(words), min_size=1, max_size=3, unique=True)
some = st.builds(
    lambda have, lack: ",".join([*have, *lack]),
    had,
    st.one_of(st.just([]), st.just([]), lacking.map(lambda word: [word])),
)
claims = st.builds(
    "{};mode=shared;extras={}{}".format, st.sampled_from(["1", "all", "mig=1g.5gb", "mig=1g.5gb+gfx"]), some, drawing
)
# Nearly every one is granted, so that it is the extras that decide.
eager = st.builds(
    lambda claim, rlimits, mounts: make.container(claim, rlimits=rlimits, mounts=mounts),
    claims,
    st.sampled_from([frozenset[str](), frozenset({MEMLOCK.type})]),
    st.sampled_from([frozenset[str](), frozenset[str](), frozenset({"/etc"}), frozenset({"/etc/cufile.json"})]),
)
DRM = [(DrmNode(f"card{index}", 226, index),) for index in range(4)]
GPUS = (*(make.gpu(index, drm=DRM[index]) for index in (0, 1)), make.mig_gpu(2, ("1g.5gb", "1g.5gb+gfx"), drm=DRM[2]))
READY = st.builds(
    lambda offers, found: make.node(found, staged=strategies.DRIVER, extras=offers),
    st.one_of(st.just(strategies.OFFERS), st.just(strategies.OFFERS), strategies.offers),
    st.sampled_from([GPUS, GPUS, (*GPUS, make.gpu(3))]),
)
ALLOWING = Policy(extras=ExtraRules(allowed=frozenset(Extra)))


@settings(max_examples=150)
@given(
    st.one_of(
        st.tuples(eager, READY, st.one_of(st.just(ALLOWING), strategies.good_policies)),
        st.tuples(strategies.containers(), strategies.nodes, strategies.good_policies),
    )
)
def test_whole_or_refused(question: tuple[Container, Node, Policy]) -> None:
    container, node, policy = question
    decision = decide(container, node, Ledger(), policy)
    if not isinstance(decision, Inject):
        return
    extras, edits = asked(container), decision.edits
    for extra in extras.asked:
        event(extra)
    assert extras.asked <= policy.extras.allowed
    assert seen(edits) <= extras.asked
    assert extras.asked - {Extra.DRM} == seen(edits)
    for extra in extras.asked & strategies.OFFERS.keys():
        assert ALL_NODES[extra] <= edits.devices.keys()
        assert ALL_MOUNTS[extra] <= edits.mounts.keys()
        assert not ALL_MOUNTS[extra] & container.mounts
    numbers = {each.minor for each in edits.devices.values() if each.path.startswith(CHANNELS_FOLDER)}
    assert numbers == set(extras.channels)
    if Extra.RDMA in extras.asked:
        assert (MEMLOCK.type in edits.rlimits) is (MEMLOCK.type not in container.rlimits)
    units = [unit for unit in node.inventory.units if unit.uuid in decision.grant.uuids]
    if Extra.DRM in extras.asked:
        assert all(whole(unit).drm for unit in units)
    drawn = {each.minor for each in edits.devices.values() if each.path.startswith("/dev/dri/")}
    able = [whole(unit) for unit in units if not isinstance(unit, MigPart) or "+gfx" in unit.device.profile]
    assert drawn <= {drm.minor for gpu in able for drm in gpu.drm}
