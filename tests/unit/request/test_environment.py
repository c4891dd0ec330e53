"""NVIDIA_VISIBLE_DEVICES as a request."""

from __future__ import annotations

import pytest

from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu_request import Claim, Devices, Everything, Wanted
from nri_gpu.request.environment import VARIABLE, claim_of_environment

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
