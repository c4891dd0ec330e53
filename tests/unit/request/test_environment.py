"""NVIDIA_VISIBLE_DEVICES as a request, and NVIDIA_DRIVER_CAPABILITIES as a list of parts of the driver."""

from __future__ import annotations

import pytest

from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu import Capability
from nri_gpu.domain.gpu_request import Claim, Devices, Everything, Wanted
from nri_gpu.request.environment import CAPABILITIES_MAX, VARIABLE, claim_of_environment, named_capabilities

UUID = "GPU-8f3a1c2e-0000-4000-8000-000000000001"
MIG = "MIG-8f3a1c2e-0000-4000-8000-000000000001"

NOTHING = ["", " ", ",", " , ,", "void", "none", "none,none", "0,void", "void,all", "all , void", "void,frob"]


@pytest.mark.parametrize("value", NOTHING)
def test_asks_for_nothing(value: str) -> None:
    assert claim_of_environment(value) is None


ASKS: dict[str, Wanted] = {
    "all": Everything(),
    " all ,": Everything(),
    "0": Devices(("0",)),
    "1,0": Devices(("1", "0")),
    "0, 0 ,1,0": Devices(("0", "1")),
    UUID: Devices((UUID,)),
    UUID.replace("f3a", "F3A"): Devices((UUID,)),
    f"{MIG},0:1": Devices((MIG, "0:1")),
}


@pytest.mark.parametrize(("value", "wanted"), ASKS.items())
def test_asks_for(value: str, wanted: Wanted) -> None:
    claim = claim_of_environment(value)
    assert isinstance(claim, Claim)
    assert (claim.key, claim.wanted, claim.mode, claim.capabilities) == (VARIABLE, wanted, None, None)


WRONG = {
    "two": '"two" does not name a GPU',
    "all,0": '"all" stands alone',
    "none,0": '"none" stands alone',
    "GPU-8f3a": "not a whole UUID",
    "MIG-8f3a": "not a whole UUID",
    f"MIG-{UUID}/1/0": "is a MIG name of drivers before 470",
    "0000:3b:00.0": "is a PCI bus id",
    "nvidia.com/gpu=0": "does not name a GPU",
    "/var/run/nvidia-container-devices": "does not name a GPU",
    "ALL": "does not name a GPU",
    "-1": "does not name a GPU",
    "01": "without leading zeros",
    "\u0661": "printable ASCII",
    "0\n": "printable ASCII",
    "0," * 3000: "over the limit of 4096",
    ",".join(map(str, range(129))): "at most 128 GPUs",
}


@pytest.mark.parametrize(("value", "words"), WRONG.items())
def test_anything_else_is_an_error_with_its_place(value: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        claim_of_environment(value)
    assert caught.value.key == VARIABLE
    assert words in str(caught.value)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 400


EVERY = ",".join(Capability)
LONG = "x" * (CAPABILITIES_MAX - len("utility,") - 2)
PARTS = {
    "": "",
    " ": "",
    ",": "",
    "all": EVERY,
    " all ": EVERY,
    "all,video": EVERY,
    "evil,all": EVERY,
    EVERY: EVERY,
    "compute": "compute",
    "compute,utility": "compute,utility",
    "\tvideo , graphics": "video,graphics",
    "video,,video": "video",
    "compat32,ngx,display": "display,ngx,compat32",
    # Words are NVIDIA's, in its case; others are passed over.
    "ALL": "",
    "none": "",
    "void": "",
    "Compute,utility": "utility",
    "compute,evil": "compute",
    "compute;utility": "",
    "compute utility": "",
    "compute\n": "",
    "all\0": "",
    "\uff41ll,ngx": "ngx",
    f"utility,{LONG},ngx": "utility",  # past what is read
    f"utility,{LONG}xx,ngx": "utility",
    f"{'x' * (CAPABILITIES_MAX - 4)},allx": "",  # cut within a word
    f"{'x' * (CAPABILITIES_MAX - 4)},all": EVERY,
    f"{'x' * (CAPABILITIES_MAX - 4)},ngx"[1:]: "ngx",  # to the last character that is read
    "," * 1_000_000: "",
}


@pytest.mark.parametrize(("value", "parts"), PARTS.items(), ids=lambda text: ascii(text)[:40])
def test_names_parts_of_the_driver(value: str, parts: str) -> None:
    assert ",".join(each for each in Capability if each in named_capabilities(value)) == parts
