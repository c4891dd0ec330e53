"""What images and pods may say to get more than they are given: refused with a reason, or nothing is injected.

Asked of the whole plugin, from the runtime's bytes to ours; each list is one of NVIDIA's ways to ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.decision import REFUSAL_MAX
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.nri.convert import EMPTY
from nri_gpu.ttrpc.frames import Status
from tests.support import nri_messages as nri
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.plugin import Bench

MIG: Final = TOPOLOGIES / "mig-a100.toml"
MEBI: Final = 2**20
UUID: Final = "GPU-0a100004-0000-4000-8000-000000000000"
WHOLE: Final = 4  # GPUs of the node
DEVICES: Final[Mapping[str, str]] = {
    "twice": "0,0",
    "gaps": "0,,1,",
    "only a comma": ",",
    "blanks": " 0 , 1 ",
    "all and void": "all,void",
    "void and all": "void,all",
    "one and none": "0,none",
    "all": "all",
    "upper case": "ALL",
    "negative": "-1",
    "a plus": "+0",
    "two zeros": "00",
    "hexadecimal": "0x0",
    "an exponent": "1e1",
    "over 32 bits": "4294967296",
    "over 64 bits": "18446744073709551616",
    "a fullwidth digit": "\uff10",
    "a line break": "0\n1",
    "a NUL": "0\0all",
    "a mebibyte of commas": "," * MEBI,
    "no uuid": "GPU-",
    "a path for a uuid": "GPU-../../etc",
    "a uuid in upper case": UUID.upper(),
    "half a uuid": UUID[:10],
    "no mig uuid": "MIG-",
    "an old mig name with a path": "MIG-GPU-x/../../0/0",
    "an old mig name": f"MIG-{UUID}/99/99",
    "a mig device that is not": "0:99",
    "no mig index": "0:",
    "no gpu index": ":0",
    "three indices": "0:0:0",
    "a bus id": "00000000:3b:00.0",
    "cdi": "nvidia.com/gpu=all",
    "cdi with a path": "runtime.nvidia.com/gpu=../x",
    "cdi and a command": "nvidia.com/gpu=0;id",
    "volumes": "/var/run/nvidia-container-devices",
    "a format": "%s%n{0}{uuid}",
}


def answer(bench: Bench, annotations: Mapping[str, str]) -> pb.CreateContainerResponse | Status | None:
    """What the runtime is told; None where nothing is added."""
    of = nri.pod(annotations=annotations)
    reply = bench.plugin.create_container(nri.create(of, nri.container(of)))
    if isinstance(reply, Status):
        assert reply.message.startswith("nri-gpu [")
        assert reply.message.isascii()
        assert reply.message.isprintable()
        assert len(reply.message) <= REFUSAL_MAX
        return reply
    return None if reply == EMPTY else pb.CreateContainerResponse.FromString(reply)


@pytest.mark.parametrize("text", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("node", [FOUR_GPUS, MIG], ids=["whole GPUs", "MIG"])
@pytest.mark.parametrize("form", ["device={}", "{}", "mig={}"])
def test_as_an_annotation_it_names_gpus_of_the_node_or_is_refused(form: str, node: Path, text: str) -> None:
    bench = Bench(topology=node)
    got = answer(bench, {"gpu.nri.io": form.format(text)})
    assert got is not None
    if isinstance(got, Status):
        assert "[bad-request]" in got.message or "[no-such-gpu]" in got.message or "[gpu-unavailable]" in got.message
        assert not bench.plugin.ledger.entries
        return
    assert form.format(text).strip() in GRANTED
    assert len(got.adjust.annotations) == 1
    uuids = got.adjust.annotations[GRANT_KEY].partition("uuid=")[2].partition(";")[0].split(",")
    assert len(set(uuids)) == len(uuids) <= WHOLE
    assert set(uuids) <= {unit.uuid for unit in bench.node.inventory.units}


# All that is understood of these texts, by our own grammar.
GRANTED: Final = ("all", "device= 0 , 1", f"device={UUID.upper()}", f"device={UUID[:10]}")


@pytest.mark.parametrize("text", GRANTED)
def test_what_is_understood_is_granted(text: str) -> None:
    assert isinstance(answer(Bench(), {"gpu.nri.io": text}), pb.CreateContainerResponse)


ANNOTATIONS: Final[Mapping[str, tuple[Mapping[str, str], bool]]] = {
    "cdi": ({"cdi.k8s.io/x": "nvidia.com/gpu=all"}, False),
    "cdi without a vendor": ({"cdi.k8s.io/x": "gpu0"}, False),
    "cdi's management device": ({"cdi.k8s.io/x": "management.nvidia.com/gpu=all"}, False),
    "like cdi": ({"cdi.k8s.io.evil/x": "nvidia.com/gpu=all"}, False),
    "like ours, longer": ({"gpu.nri.io.evil/pod": "all"}, False),
    "like ours, with more in front": ({"xgpu.nri.io/pod": "all", "x/gpu.nri.io": "all"}, False),
    "like ours, in upper case": ({"GPU.NRI.IO": "all"}, False),
    "like ours, with a dash": ({"gpu.nri.io-evil": "all"}, False),
    "like ours, with a fullwidth letter": ({"gpu\uff0enri.io": "all"}, False),
    "empty": ({"gpu.nri.io": ""}, True),
    "blank": ({"gpu.nri.io": " \t "}, True),
    "256 KiB": ({"gpu.nri.io": "1;" * 2**17}, True),
    "256 KiB of one device": ({"gpu.nri.io": "device=" + "0" * 2**18}, True),
    "256 KiB of devices": ({"gpu.nri.io": "device=" + "0," * 2**17}, True),
    "a NUL": ({"gpu.nri.io": "1\0;mode=shared"}, True),
    "an escape": ({"gpu.nri.io": "\x1b[2Jall"}, True),
    "a line break": ({"gpu.nri.io": "1\nall"}, True),
    "another writing direction": ({"gpu.nri.io": "\u202eall"}, True),
    "fullwidth": ({"gpu.nri.io": "\uff11"}, True),
    "a key that means nothing": ({"gpu.nri.io/grant": "all"}, True),
    "a key with control characters": ({"gpu.nri.io/\x1b[2J\n": "all"}, True),
    "a key without a name": ({"gpu.nri.io/": "all"}, True),
    "a long key": ({"gpu.nri.io/" + "x" * 2**18: "all"}, True),
    "a key with a path": ({"gpu.nri.io/container.main/../pod": "all"}, False),
    "a grant of one's own": ({"gpu.nri.io/grant": "v1;mode=shared;uuid=GPU-0;gen=x;mac=00"}, True),
    "thousands of others'": ({f"evil-{n}.example/gpu.nri.io": "all" for n in range(5_000)}, False),
    "thousands for other containers": ({f"gpu.nri.io/container.other-{n}": "all" for n in range(5_000)}, False),
    "thousands that mean nothing": ({f"gpu.nri.io/evil-{n}": "all" for n in range(5_000)}, True),
    "thousands, and one's own opts out": (
        {f"gpu.nri.io/container.other-{n}": "all" for n in range(5_000)} | {"gpu.nri.io/container.main": "frobnicate"},
        True,
    ),
}


@pytest.mark.parametrize(("annotations", "refused"), ANNOTATIONS.values(), ids=ANNOTATIONS)
def test_annotations(annotations: Mapping[str, str], refused: bool) -> None:
    bench = Bench()
    got = answer(bench, annotations)
    assert isinstance(got, Status) if refused else got is None
    assert not bench.plugin.ledger.entries
