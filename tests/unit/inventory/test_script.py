"""Events and signs that a topology file scripts."""

from __future__ import annotations

import pytest

from nri_gpu.domain.health import ScriptedEvent, Sign
from nri_gpu.inventory.topology import TopologyError, parse_topology

NODE = """schema = 1
[node]
[[gpu]]
index = 0
minor = 0
uuid = "GPU-0b200000-0000-4000-8000-000000000000"
bus_id = "0000:10:00.0"
model = "NVIDIA H100"
memory_bytes = 1
arch = "9.0"
"""


def event(at_s: int = 2, gpu: int = 0, xid: int = 79) -> str:
    return f"[[event]]\nat_s = {at_s}\ngpu = {gpu}\nxid = {xid}\n"


def test_events_in_the_order_of_their_time() -> None:
    script = parse_topology(NODE + event() + event(at_s=1, xid=63), "f", 0.0).script
    assert script == (ScriptedEvent(1, 0, 63), ScriptedEvent(2, 0, 79))


def test_signs() -> None:
    gpus = parse_topology(NODE + 'signs = "thermal, remap-pending"\n', "f", 0.0).gpus
    assert gpus[0].signs == (Sign.THERMAL, Sign.REMAP_PENDING)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (event(gpu=1), "event[0].gpu: there is no GPU with index 1"),
        (event(xid=0), "event[0].xid: 0 is not from 1 to 65535"),
        (event(at_s=-1), "event[0].at_s: -1 is not from 0 to 86400"),
        (event() + "when = 2\n", "event[0].when: unknown key (known here: at_s, gpu, xid)"),
        ('signs = "sad"\n', "gpu[0].signs: 'sad' is no sign ("),
    ],
)
def test_faults(text: str, expected: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology(NODE + text, "f", 0.0)
    assert [expected in str(fault) for fault in caught.value.faults] == [True]
