"""Whatever differs between two nodes is said, and of equal ones nothing is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.changes import changes
from tests.property.test_record import inventories

# One of them says that a remap is pending.
OF_A_GPU = st.sets(st.sampled_from([name for name in Gpu.__struct_fields__ if name not in ("uuid", "remap_pending")]))
OF_THE_NODE = st.sets(st.sampled_from(Inventory.__struct_fields__))


@settings(max_examples=60)
@given(inventories(), inventories(), OF_THE_NODE, OF_A_GPU)
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
