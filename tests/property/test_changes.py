"""Whatever differs between two nodes is said, and of equal ones nothing is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.changes import changes
from tests.property.test_record import inventories

OF_A_GPU = st.sets(st.sampled_from([name for name in Gpu.__struct_fields__ if name != "uuid"]))
OF_THE_NODE = st.sets(st.sampled_from(Inventory.__struct_fields__))


def told(inventory: Inventory) -> Inventory:
    """Without `remap_pending`: that a remap is pending is told by a sign."""
    return replace(inventory, gpus=tuple(replace(gpu, remap_pending=None) for gpu in inventory.gpus))


@settings(max_examples=60)
@given(inventories().map(told), inventories().map(told), OF_THE_NODE, OF_A_GPU)
def test_a_change_is_said_wherever_it_is(
    before: Inventory, other: Inventory, of_the_node: set[str], of_a_gpu: set[str]
) -> None:
    """Some facts of the node are another's, and some of each GPU that both have."""
    after = replace(before, **{name: getattr(other, name) for name in of_the_node})
    known = {gpu.uuid: gpu for gpu in other.gpus}
    gpus = (replace(gpu, **{name: getattr(known.get(gpu.uuid, gpu), name) for name in of_a_gpu}) for gpu in before.gpus)
    if "gpus" not in of_the_node:
        after = replace(after, gpus=tuple(gpus))
    assert (changes(before, after) == ()) == (before == after)
