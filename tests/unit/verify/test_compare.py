"""Each difference between a container and its signed grant, as a sentence; and none where there is none."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.edits import Channels, DeviceNode, Extra, NodeExtra
from nri_gpu.domain.gpu import DrmNode, GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Majors
from nri_gpu.injection.device_numbers import device_numbers
from nri_gpu.ledger.grant_text import InvalidGrant, SignedGrant
from nri_gpu.verify.compare import NAMED_MAX, Seen, differences
from nri_gpu.verify.oci_spec import (
    Spec,
    SpecDevice,
    SpecHook,
    SpecLinux,
    SpecMount,
    SpecProcess,
    SpecResources,
    SpecRule,
    Variables,
)
from tests.support import builders as make

STAGE = "/var/lib/nri-gpu/drivers"
CTL, MODESET, UVM, UVM_TOOLS = (195, 255), (195, 254), (511, 0), (511, 1)
MINE, OTHER = (195, 7), (195, 6)  # GPU 0 has minor 7
NODES = (MINE, CTL, UVM, UVM_TOOLS)
EVERYTHING = SpecRule(allow=True, access="rwm")


def rules(*numbers: DeviceNumber) -> tuple[SpecRule, ...]:
    denied = SpecRule(allow=False, access="rwm")
    return (denied, *(SpecRule(allow=True, type="c", major=a, minor=b, access="rw") for a, b in numbers))


def spec(
    *numbers: DeviceNumber,
    opened: tuple[SpecRule, ...] | None = None,
    generations: tuple[str, ...] = (make.GENERATION,),
    env: tuple[str, ...] = (f"NVIDIA_VISIBLE_DEVICES={make.uuid(0)}",),
) -> Spec:
    """A spec with nodes of these numbers, and their rules."""
    nodes = tuple(SpecDevice("/dev/x", "c", *number) for number in numbers)
    mounts = tuple(SpecMount("/usr/local/nvidia", f"{STAGE}/{each}/all") for each in generations)
    resources = SpecResources(rules(*numbers) if opened is None else opened)
    return Spec(
        process=SpecProcess(Variables(pair.split("=") for pair in env)),
        mounts=mounts,
        linux=SpecLinux(nodes, resources),
    )


def grant(*uuids: GpuUuid, generation: str = make.GENERATION) -> SignedGrant:
    return SignedGrant(uuids, Mode.EXCLUSIVE if uuids else None, generation)


TRAINER = Seen(spec=spec(*NODES), grant=grant(make.uuid(0)), opens={*NODES}, staged=frozenset({make.GENERATION}))
BYSTANDER = Seen(spec=spec(generations=(), env=()), grant=None, opens=set(), staged=frozenset())
INVENTORY = make.inventory()


def told(seen: Seen, inventory: Any = INVENTORY, **fields: Any) -> list[str]:  # noqa: ANN401
    return list(differences(replace(seen, **fields), device_numbers(inventory), STAGE))


def only(seen: Seen, **fields: Any) -> str:  # noqa: ANN401
    [sentence] = told(seen, **fields)
    return sentence


# --- devices ----------------------------------------------------------------------------------------------------------


def test_everything_opened_is_one_sentence_with_the_gpus_first() -> None:
    sentence = only(BYSTANDER, opens=device_numbers(INVENTORY).keys())
    assert sentence.startswith("can open /dev/nvidia4 (195:4, GPU 3,")
    assert sentence.index("/dev/nvidiactl (195:255)") < sentence.index(f"and {28 + 8 - NAMED_MAX} more")


def test_a_rule_without_a_node_and_a_node_of_another_component() -> None:
    opened = (*rules(), SpecRule(allow=True, type="c", major=195, minor=-1, access="rw"))
    assert "a device rule of its spec opens it" in only(
        BYSTANDER, spec=spec(opened=opened, generations=(), env=()), opens={OTHER}
    )
    sentence = only(BYSTANDER, spec=spec(OTHER, generations=(), env=()), opens={OTHER})
    assert "an external allocation" in sentence
    assert "/dev/nvidia6 (195:6, GPU 1" in sentence


def test_a_hook_of_nvidias_runtime_opens_by_itself() -> None:
    hooks = {"prestart": (SpecHook("/usr/bin/env", ("/usr/bin/nvidia-container-runtime-hook", "prestart")),)}
    hooked = replace(spec(generations=(), env=()), hooks=hooks)
    assert "its spec has a hook of NVIDIA's runtime" in only(BYSTANDER, spec=hooked, opens={OTHER})
    assert told(BYSTANDER, spec=hooked) == []
    other = replace(hooked, hooks={"prestart": (SpecHook("/bin/true"),), "poststop": None})
    assert "widened" in only(BYSTANDER, spec=other, opens={OTHER})


def test_a_rule_that_a_later_one_takes_back_opens_nothing() -> None:
    opened = (SpecRule(allow=True, type="c", major=195, access="rw"), *rules())
    assert "widened" in only(BYSTANDER, spec=spec(opened=opened, generations=(), env=()), opens={OTHER})


def test_a_node_that_the_kernel_does_not_let_it_open() -> None:
    sentence = only(BYSTANDER, spec=spec(OTHER, opened=rules(), generations=(), env=()))
    assert "its spec has /dev/nvidia6" in sentence
    assert "does not let it open" in sentence


@pytest.mark.parametrize("lost", NODES)
def test_rules_that_were_taken_away(lost: DeviceNumber) -> None:
    sentence = only(TRAINER, opens={*NODES} - {lost})
    assert f"({lost[0]}:{lost[1]}" in sentence
    assert "cannot open" in sentence
    assert "nri-gpu prepare" in sentence


def test_a_spec_without_the_granted_gpus_node() -> None:
    assert "its spec has no node /dev/nvidia7" in only(TRAINER, spec=spec(CTL), opens={CTL})


def test_a_gpu_that_got_another_number() -> None:
    """The driver was loaded again: the grant's GPU has minor 7 no more, and another one has."""
    swapped = make.inventory([make.gpu(0, minor_number=6), make.gpu(1, minor_number=7)])
    said = told(TRAINER, swapped)
    assert len(said) == 2
    assert f"its spec has no node /dev/nvidia6 (195:6, GPU 0, {make.uuid(0)})" in said[0]
    assert f"can open /dev/nvidia7 (195:7, GPU 1, {make.uuid(1)}), not granted" in said[1]
    assert "the driver has been reloaded since" in said[1]


def test_a_gpu_that_is_gone() -> None:
    said = told(TRAINER, make.inventory([make.gpu(1)]))
    assert f"was granted {make.uuid(0)}, which is no longer on this node" in said[0]
    assert "a GPU that nri-gpu does not know" in said[1]
    assert "the driver was reloaded, or" in said[0]
    assert "the driver has been reloaded since" in said[1]


def test_a_privileged_container_may_open_everything() -> None:
    wide = spec(opened=(EVERYTHING,), generations=(), env=())
    assert told(BYSTANDER, spec=wide, opens=device_numbers(INVENTORY).keys()) == []
    granted = replace(spec(*NODES), linux=SpecLinux(spec(*NODES).nodes, SpecResources((EVERYTHING,))))
    assert told(TRAINER, spec=granted, opens=device_numbers(INVENTORY).keys()) == []
    assert "no variable" in only(TRAINER, spec=replace(granted, process=None), opens={*NODES, OTHER})


MIG = make.inventory([make.mig_gpu(0), make.gpu(1)])
PARTS = MIG.gpus[0].mig
CAPS = [((510, each.gpu_instance_minor or 0), (510, each.compute_instance_minor or 0)) for each in PARTS]


def test_a_mig_device_is_its_capabilities() -> None:
    numbers = {*NODES, *CAPS[0]}
    named = (f"NVIDIA_VISIBLE_DEVICES={PARTS[0].uuid}",)
    seen = replace(TRAINER, spec=spec(*numbers, env=named), grant=grant(PARTS[0].uuid), opens=numbers)
    assert told(seen, MIG) == []
    [sentence] = told(seen, MIG, opens={*numbers, *CAPS[1]})
    assert f"MIG device 0:1, {PARTS[1].uuid}" in sentence
    [sentence] = told(seen, MIG, opens=numbers - {CAPS[0][1]})
    assert f"MIG device 0:0, {PARTS[0].uuid}" in sentence


def test_nodes_to_draw_come_with_their_gpu_or_not_at_all() -> None:
    drawing = make.inventory([make.gpu(0, drm=(DrmNode("renderD128", 226, 128),)), make.gpu(1)])
    assert told(TRAINER, drawing) == []
    assert told(TRAINER, drawing, spec=spec(*NODES, (226, 128)), opens={*NODES, (226, 128)}) == []
    [sentence] = told(BYSTANDER, drawing, opens={(226, 128)})
    assert f"/dev/dri/renderD128 (226:128, GPU 0, {make.uuid(0)})" in sentence


def test_extras_are_those_of_the_spec() -> None:
    extras = {
        Extra.GDRCOPY: NodeExtra(nodes=(DeviceNode("/dev/gdrdrv", 240, 0),)),
        Extra.RDMA: NodeExtra(nodes=(DeviceNode("/dev/infiniband/uverbs0", 231, 192),)),
        Extra.IMEX: NodeExtra(channels=Channels(241, 2048)),
    }
    node = make.inventory(extras=extras)
    more = (*NODES, (240, 0), (241, 1), MODESET)
    assert told(TRAINER, node, spec=spec(*more), opens={*more}) == []
    [sentence] = told(TRAINER, node, opens={*more})
    assert all(path in sentence for path in ("/dev/gdrdrv", "channel1", "/dev/nvidia-modeset"))
    assert told(BYSTANDER, node, opens={(231, 192)}) == []  # an adapter is no GPU


def test_without_a_driver_there_is_no_number() -> None:
    assert device_numbers(make.inventory((), majors=Majors())) == {}


# --- mounts and environment -------------------------------------------------------------------------------------------


def test_driver_files_of_another_generation() -> None:
    said = told(TRAINER, spec=spec(*NODES, generations=("570.1-00",)), staged=frozenset({"570.1-00"}))
    assert said[0] == f"mounts driver files of generation 570.1-00, and its grant is of {make.GENERATION}"
    assert said[1] == f"its grant is of driver generation {make.GENERATION}, and its spec mounts nothing of it"
    told_of = only(BYSTANDER, spec=spec(generations=("570.1-00",), env=()), staged=frozenset({"570.1-00"}))
    assert told_of == "mounts driver files of generation 570.1-00, and it has no grant"


def test_a_compatibility_package_and_profiles_belong_to_a_grant() -> None:
    both = (make.GENERATION, "compat14.0-600", "profiles")
    signed = grant(make.uuid(0), generation=f"{make.GENERATION}+compat14.0-600")
    assert told(TRAINER, spec=spec(*NODES, generations=both), grant=signed, staged=frozenset(both)) == []


def test_mounts_that_only_the_kernel_or_only_the_spec_has() -> None:
    assert "the kernel shows 570.1-00" in only(TRAINER, staged=frozenset({make.GENERATION, "570.1-00"}))
    assert "it was unmounted" in only(TRAINER, staged=frozenset())


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ((), "has no variable NVIDIA_VISIBLE_DEVICES"),
        (("NVIDIA_VISIBLE_DEVICES=all",), 'its variable NVIDIA_VISIBLE_DEVICES is "all"'),
        (("NVIDIA_VISIBLE_DEVICES=void",), "has no variable NRI_GPU_UUIDS"),
        (("NVIDIA_VISIBLE_DEVICES=void", f"NRI_GPU_UUIDS={make.uuid(1)}"), "its variable NRI_GPU_UUIDS is"),
        ((f"NVIDIA_VISIBLE_DEVICES={make.uuid(0)}", "NVIDIA_VISIBLE_DEVICES=\n"), r'is "\n"'),
    ],
)
def test_an_environment_that_says_something_else(env: tuple[str, ...], words: str) -> None:
    assert words in only(TRAINER, spec=spec(*NODES, env=env))


def test_a_grant_that_is_not_valid_grants_nothing() -> None:
    said = told(TRAINER, grant=InvalidGrant("its mac does not match"))
    assert said[0] == "its signed grant is not valid: its mac does not match"
    assert "can open /dev/nvidia7 (195:7, GPU 0" in said[1]
    assert "and it has no grant" in said[2]
