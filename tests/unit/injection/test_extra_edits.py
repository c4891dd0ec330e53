"""What extras are made of, and why one cannot be given."""

from __future__ import annotations

import pytest

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
    Rlimit,
)
from nri_gpu.domain.gpu import Capability, DrmNode, Unit
from nri_gpu.injection.device_nodes import device_nodes, draws
from nri_gpu.injection.extra_edits import ExtraRequest, extra_edits, extras_note
from tests.support import builders as make

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
CHANNELS = tuple(DeviceNode(f"/dev/nvidia-caps-imex-channels/channel{number}", 511, number) for number in (0, 7))
MEMLOCK = Rlimit("RLIMIT_MEMLOCK", UNLIMITED, UNLIMITED)


def wish(
    *asked: Extra,
    channels: tuple[int, ...] = (),
    gpus: tuple[Unit, ...] = (DRAWING,),
    container: Container | None = None,
) -> ExtraRequest:
    extras = Extras(frozenset(asked), channels)
    return ExtraRequest(extras, gpus, make.node(extras=OFFERS), container or make.container())


BOUND_MEMORY = make.container(rlimits=frozenset({"RLIMIT_MEMLOCK"}))
VOLUMES_ABOVE = make.container(mounts=frozenset({"/etc", "/", "", "/etc/cufile.jso"}))
GIVEN = {
    "nothing": (wish(), NO_EDITS),
    "nodes to draw on": (wish(Extra.DRM), Edits.of(devices=DRM_NODES)),
    "leave to pin memory": (wish(Extra.RDMA), Edits.of(devices=(UVERBS,), rlimits=(MEMLOCK,))),
    "no leave where there is a limit": (wish(Extra.RDMA, container=BOUND_MEMORY), Edits.of(devices=(UVERBS,))),
    "files": (wish(Extra.GDS), Edits.of(devices=(FS,), mounts=(CUFILE,))),
    "files below a volume": (wish(Extra.GDS, container=VOLUMES_ABOVE), Edits.of(devices=(FS,), mounts=(CUFILE,))),
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


def test_a_limit_that_is_there_is_told_of() -> None:
    extras = Extras(frozenset({Extra.RDMA}))
    assert "RLIMIT_MEMLOCK" in extras_note(extras, BOUND_MEMORY)
    assert extras_note(NO_EXTRAS, BOUND_MEMORY) == extras_note(extras, make.container()) == ""


def test_what_is_no_extra_any_more_is_told_of() -> None:
    both = extras_note(Extras(frozenset({Extra.RDMA}), ignored=("profile",)), BOUND_MEMORY)
    assert both.startswith("extra profile no longer exists and is ignored: leave it out; the container sets its own")


def covering(place: str) -> ExtraRequest:
    """A volume in the place of a file."""
    return wish(Extra.GDS, container=make.container(mounts=frozenset({place})))


CANNOT = "cannot be given on this node:"
NOT_READY, BAD = Code.NODE_NOT_READY, Code.BAD_REQUEST
REFUSED = {
    "lacking": (wish(Extra.GDRCOPY), NOT_READY, f"extra gdrcopy {CANNOT} there is no /dev/gdrdrv (`modprobe"),
    "not looked for": (wish(Extra.NVSWITCH), NOT_READY, f"extra nvswitch {CANNOT} the node was not searched"),
    "channel beyond": (wish(Extra.IMEX, channels=(0, 8)), NOT_READY, "channel 8 is not one of its 8, which count"),
    "no node to draw on": (wish(Extra.DRM, gpus=(make.gpu(1),)), NOT_READY, "GPU 1 has no node below /dev/dri: load"),
    "mig that cannot draw": (wish(Extra.DRM, gpus=CUT.parts[:1]), NOT_READY, "is a 1g.5gb, and only profiles with"),
    "a volume there": (covering("/etc/cufile.json"), BAD, "/etc/cufile.json"),
    "a volume there, in another spelling": (covering("/etc//./cufile.json/"), BAD, "/etc/cufile.json"),
    "a volume below": (covering("/etc/cufile.json/x"), BAD, "/etc/cufile.json"),
}


@pytest.mark.parametrize(("asked", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_given_is_named(asked: ExtraRequest, code: Code, words: str) -> None:
    reason = extra_edits(asked)
    assert isinstance(reason, Reason), reason
    assert reason.code is code
    assert words in reason.sentence
    assert reason.sentence.endswith(".")


PROFILED = {"1g.5gb": False, "1g.5gb+gfx": True, "1g.24gb+me.gfx": True, "2g.5gb+me": False, "1g.5gb-gfx": False}


@pytest.mark.parametrize(("profile", "can"), PROFILED.items(), ids=PROFILED)
def test_a_mig_device_draws_only_where_its_profile_says_so(profile: str, can: bool) -> None:
    (part,) = make.mig_gpu(2, (profile,), drm=DRM).parts
    assert draws(part) is can
    nodes = {each.path for each in device_nodes((part,), frozenset({Capability.GRAPHICS}), make.MAJORS)}
    assert nodes & {each.path for each in DRM_NODES} == ({each.path for each in DRM_NODES} if can else set())
