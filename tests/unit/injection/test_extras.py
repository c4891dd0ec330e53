"""What extras are made of, and why one cannot be given."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import (
    NO_EDITS,
    NO_EXTRAS,
    UNLIMITED,
    Channels,
    DeviceNode,
    Edits,
    Extra,
    Extras,
    Mount,
    NodeExtra,
    Profiles,
    Rlimit,
)
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capability, DrmNode, Unit
from nri_gpu.domain.node import Node
from nri_gpu.injection.devices import device_nodes, draws
from nri_gpu.injection.extras import PROFILE_PLACE, ExtraRequest, extra_edits, kept_limits
from tests.support import builders as make

GRAPHICS = frozenset({Capability.GRAPHICS})
DRM = (DrmNode("card1", 226, 1), DrmNode("renderD129", 226, 129))
BOUND = make.gpu(2).pci_bus_id
DRM_NODES = (
    DeviceNode("/dev/dri/card1", 226, 1),
    DeviceNode(f"/dev/dri/by-path/pci-{BOUND}-card", 226, 1),
    DeviceNode("/dev/dri/renderD129", 226, 129),
    DeviceNode(f"/dev/dri/by-path/pci-{BOUND}-render", 226, 129),
)
DRAWING = make.gpu(2, drm=DRM)
CUT = make.mig_gpu(2, ("1g.5gb", "1g.5gb+gfx"), drm=DRM)
UVERBS = DeviceNode("/dev/infiniband/uverbs0", 231, 192)
FS = DeviceNode("/dev/nvidia-fs0", 1520, 0)
CUFILE = Mount("/etc/cufile.json", "/etc/cufile.json")
CONFIG = DeviceNode("/dev/nvidia-caps/nvidia-cap1", 510, 1, 0o400)
OFFERS = {
    Extra.RDMA: NodeExtra((UVERBS,)),
    Extra.GDS: NodeExtra((FS,), (CUFILE,)),
    Extra.IMEX: NodeExtra(channels=Channels(511, 8)),
    Extra.MIG_CONFIG: NodeExtra((CONFIG,)),
    Extra.GDRCOPY: NodeExtra(lacking="there is no /dev/gdrdrv (`modprobe gdrdrv`)"),
}
PROFILES = Profiles("/stage/profiles", frozenset(range(8)))
CHANNELS = tuple(DeviceNode(f"/dev/nvidia-caps-imex-channels/channel{number}", 511, number) for number in (0, 7))
MEMLOCK = Rlimit("RLIMIT_MEMLOCK", UNLIMITED, UNLIMITED)


def node(**fields: object) -> Node:
    return replace(make.node(extras=OFFERS), **{"profiles": PROFILES, **fields})


def wish(
    *asked: Extra,
    channels: tuple[int, ...] = (),
    gpus: tuple[Unit, ...] = (DRAWING,),
    of: Node | None = None,
    container: Container | None = None,
    capabilities: frozenset[Capability] = DEFAULT_CAPABILITIES,
) -> ExtraRequest:
    extras = Extras(frozenset(asked), channels)
    return ExtraRequest(extras, gpus, capabilities, of or node(), container or make.container())


def given(asked: ExtraRequest) -> Edits:
    parts = extra_edits(asked)
    assert isinstance(parts, Edits), parts
    return parts


def refused(asked: ExtraRequest) -> Reason:
    reason = extra_edits(asked)
    assert isinstance(reason, Reason), reason
    assert reason.sentence.endswith(".")
    return reason


GIVEN = {
    "nothing": (wish(), NO_EDITS),
    "nodes to draw on": (wish(Extra.DRM), Edits.of(devices=DRM_NODES)),
    "leave to pin memory": (wish(Extra.RDMA), Edits.of(devices=(UVERBS,), rlimits=(MEMLOCK,))),
    "files": (wish(Extra.GDS), Edits.of(devices=(FS,), mounts=(CUFILE,))),
    "the channels asked for": (wish(Extra.IMEX, channels=(0, 7)), Edits.of(devices=CHANNELS)),
    "the driver's own mode": (wish(Extra.MIG_CONFIG), Edits.of(devices=(CONFIG,))),
    "several": (
        wish(Extra.RDMA, Extra.GDS),
        Edits.of(devices=(FS, UVERBS), mounts=(CUFILE,), rlimits=(MEMLOCK,)),
    ),
}


@pytest.mark.parametrize(("asked", "edits"), GIVEN.values(), ids=GIVEN)
def test_what_an_extra_is_made_of(asked: ExtraRequest, edits: Edits) -> None:
    assert extra_edits(asked) == edits


def test_a_limit_that_is_there_stays_and_is_told_of() -> None:
    bound = make.container(rlimits=frozenset({"RLIMIT_MEMLOCK"}))
    assert given(wish(Extra.RDMA, container=bound)) == Edits.of(devices=(UVERBS,))
    extras = Extras(frozenset({Extra.RDMA}))
    assert "RLIMIT_MEMLOCK" in kept_limits(extras, bound)
    assert kept_limits(NO_EXTRAS, bound) == kept_limits(extras, make.container()) == ""


def test_a_profile_is_one_file_for_just_these_gpus() -> None:
    parts = given(wish(Extra.PROFILE, gpus=(make.gpu(0), DRAWING), capabilities=GRAPHICS))
    assert parts == Edits.of(mounts=(Mount(PROFILE_PLACE, "/stage/profiles/a0.conf"),))  # minors 7 and 5
    assert "ro" in parts.mounts[PROFILE_PLACE].options


def test_of_a_mig_device_the_profile_names_its_gpu() -> None:
    parts = given(wish(Extra.PROFILE, gpus=CUT.parts, capabilities=GRAPHICS))
    assert parts.mounts[PROFILE_PLACE].source == "/stage/profiles/20.conf"


REFUSED = {
    "lacking": (wish(Extra.GDRCOPY), "extra gdrcopy cannot be given on this node: there is no /dev/gdrdrv (`modprobe"),
    "not looked for": (wish(Extra.NVSWITCH), "extra nvswitch cannot be given on this node: the node was not searched"),
    "channel beyond": (wish(Extra.IMEX, channels=(0, 8)), "channel 8 is not one of its 8, which count from 0"),
    "no node to draw on": (
        wish(Extra.DRM, gpus=(make.gpu(1),)),
        "GPU 1 has no node below /dev/dri: load kernel module",
    ),
    "mig that cannot draw": (wish(Extra.DRM, gpus=(CUT.parts[0],)), "is a 1g.5gb, and only profiles with +gfx"),
    "no profile yet": (wish(Extra.PROFILE, of=node(profiles=None), capabilities=GRAPHICS), "try again in a moment"),
    "no profile of that GPU": (
        wish(Extra.PROFILE, of=node(profiles=Profiles("/x", frozenset({1}))), capabilities=GRAPHICS),
        "no file is written for these GPUs yet; try again in a moment",
    ),
    "too many GPUs for profiles": (
        wish(Extra.PROFILE, of=node(profiles=Profiles("/x", fault="it has 16 GPUs")), capabilities=GRAPHICS),
        "extra profile cannot be given on this node: it has 16 GPUs.",
    ),
}


@pytest.mark.parametrize(("asked", "words"), REFUSED.values(), ids=REFUSED)
def test_what_the_node_lacks_is_named(asked: ExtraRequest, words: str) -> None:
    reason = refused(asked)
    assert (reason.code, words in reason.sentence) == (Code.NODE_NOT_READY, True), reason.sentence


def test_a_profile_without_graphics_is_a_mistake() -> None:
    reason = refused(wish(Extra.PROFILE))
    assert (reason.code, "capabilities=graphics" in reason.sentence) == (Code.BAD_REQUEST, True)


@pytest.mark.parametrize(
    "place", ["/etc/cufile.json", "/etc//cufile.json/", "/etc/./cufile.json", "/etc/cufile.json/x"]
)
def test_a_volume_of_the_containers_own_is_never_hidden(place: str) -> None:
    reason = refused(wish(Extra.GDS, container=make.container(mounts=frozenset({place}))))
    assert (reason.code, "/etc/cufile.json" in reason.sentence) == (Code.BAD_REQUEST, True)


def test_a_volume_above_is_in_nobodys_way() -> None:
    given(wish(Extra.GDS, container=make.container(mounts=frozenset({"/etc", "/", "", "/etc/cufile.jso"}))))


PROFILED = {"1g.5gb": False, "1g.5gb+gfx": True, "1g.24gb+me.gfx": True, "2g.5gb+me": False, "1g.5gb-gfx": False}


@pytest.mark.parametrize(("profile", "can"), PROFILED.items(), ids=PROFILED)
def test_a_mig_device_draws_only_where_its_profile_says_so(profile: str, can: bool) -> None:
    (part,) = make.mig_gpu(2, (profile,), drm=DRM).parts
    assert draws(part) is can
    nodes = {each.path for each in device_nodes((part,), GRAPHICS, make.MAJORS)}
    assert nodes & {each.path for each in DRM_NODES} == ({each.path for each in DRM_NODES} if can else set())
