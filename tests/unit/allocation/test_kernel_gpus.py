"""GPUs that the kernel shows and NVML does not list: named in refusals, granted to nobody."""

from __future__ import annotations

import pytest

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.placement import Asker, place
from nri_gpu.decision.eligibility import node_fault
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.domain.gpu import PciBusId
from nri_gpu.domain.node import Inventory, KernelGpu
from nri_gpu.request.parse import parse_claim
from tests.support import builders as make

UUID = "GPU-77777777-0000-4000-8000-000000000000"
AWAY = KernelGpu(pci_bus_id=PciBusId("0000:70:00.0"), reason="bound to vfio-pci, for a virtual machine", uuid=UUID)
ALONE = make.inventory([], unlisted=(AWAY,))
BESIDE = make.inventory([make.gpu(0)], unlisted=(AWAY,))


def refusal(text: str, inventory: Inventory) -> Reason:
    asker = Asker(make.pod("me").uid, Mode.EXCLUSIVE)
    reason = place(parse_claim(make.KEY, text), asker, inventory, Ledger())
    assert isinstance(reason, Reason), reason
    assert str(reason).endswith(".")
    return reason


@pytest.mark.parametrize("name", [AWAY.pci_bus_id, "0000:70:00.0".upper(), UUID, "GPU-7777"])
@pytest.mark.parametrize("inventory", [ALONE, BESIDE], ids=["alone", "beside another"])
def test_by_its_name(name: str, inventory: Inventory) -> None:
    reason = refusal(f"device={name}", inventory)
    assert reason.code is Code.GPU_UNAVAILABLE
    assert "GPU 0000:70:00.0 cannot be granted: bound to vfio-pci" in reason.sentence


@pytest.mark.parametrize(
    ("text", "inventory"),
    [("1", ALONE), ("all", ALONE), ("model=*", ALONE), ("device=0", ALONE), ("2", BESIDE), ("model=h100", BESIDE)],
)
def test_in_passing(text: str, inventory: Inventory) -> None:
    reason = refusal(text, inventory)
    assert reason.code is Code.NO_SUCH_GPU
    assert "GPU 0000:70:00.0: bound to vfio-pci" in reason.sentence


def test_all_is_all_that_nvml_lists() -> None:
    chosen = place(parse_claim(make.KEY, "all"), Asker(make.pod("me").uid, Mode.EXCLUSIVE), BESIDE, Ledger())
    assert chosen == BESIDE.gpus


def test_a_gpu_without_a_uuid_is_nobodys_beginning() -> None:
    nameless = make.inventory([], unlisted=(KernelGpu(pci_bus_id=PciBusId("0000:70:00.0"), reason="x"),))
    assert refusal("device=GPU-7777", nameless).code is Code.NO_SUCH_GPU


def test_a_node_whose_driver_cannot_be_asked_says_which_gpus_it_has() -> None:
    fault = "nvmlInit: Driver Not Loaded (9): the nvidia kernel module is not loaded: run `modprobe nvidia`"
    named = KernelGpu(pci_bus_id=PciBusId("0000:71:00.0"), reason=fault, model="NVIDIA L4")
    node = make.node([], fault=fault, unlisted=(AWAY, named))
    reason = node_fault(frozenset(), node)
    assert reason
    assert reason.sentence == (
        f"this node cannot grant GPUs: {fault} (the kernel shows GPU 0000:70:00.0, {AWAY.reason}; "
        "0000:71:00.0 NVIDIA L4)."
    )


def test_many_of_them_leave_room_for_the_rest() -> None:
    many = tuple(KernelGpu(pci_bus_id=PciBusId(f"0000:{n:02x}:00.0"), reason="x" * 400) for n in range(16))
    node = make.node([], fault="no driver", unlisted=many)
    assert len(str(node_fault(frozenset(), node))) < REFUSAL_MAX
    assert "; and 13 more)." in str(node_fault(frozenset(), node))
    assert len(refusal("1", make.inventory([], unlisted=many)).sentence) < REFUSAL_MAX
