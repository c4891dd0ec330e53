"""Events and signs that a topology file scripts."""

from __future__ import annotations

import pytest

from nri_gpu.domain.health import EventType, ScriptedEvent, Sign
from nri_gpu.simulation.topology import TopologyError, parse_topology

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


@pytest.mark.parametrize("kind", EventType)
def test_each_kind_of_event_by_its_name(kind: EventType) -> None:
    word = (kind.name or "").lower().replace("_", "-")
    xid = "xid = 79\n" if kind is EventType.XID else ""
    (event,) = parse_topology(f'{NODE}[[event]]\nat_s = 0.5\ngpu = 0\nkind = "{word}"\n{xid}', "f", 0.0).script
    assert event == ScriptedEvent(0.5, 0, 79 if xid else 0, kind)


@pytest.mark.parametrize("text", ['"thermal, remap-pending"', '["thermal", "remap-pending", "thermal"]'])
def test_signs(text: str) -> None:
    gpus = parse_topology(f"{NODE}signs = {text}\n", "f", 0.0).gpus
    assert gpus[0].signs == (Sign.THERMAL, Sign.REMAP_PENDING)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (event(gpu=1), "event[0].gpu: there is no GPU with index 1"),
        (event(xid=0), "event[0].xid: 0 is not from 1 to 65535"),
        (event(at_s=-1), "event[0].at_s: -1 is not from 0 to 31536000"),
        (event() + "when = 2\n", "event[0].when: unknown key (known here: at_s, gpu, kind, xid)"),
        (
            event() + "kind = 'flood'\n",
            "event[0].kind: 'flood' is none of double-bit-ecc, xid, mig-changed, ",
        ),
        (event() + "kind = 'poison'\n", "event[0].xid: only an event of kind xid has a number"),
        ("[[event]]\nat_s = 1\ngpu = 0\n", "event[0].xid: missing"),
        ('signs = "sad"\n', "gpu[0].signs: 'sad' is not a sign ("),
        ("signs = [5]\n", "gpu[0].signs: must be an array of texts, or one text with commas"),
        ("signs = true\n", "gpu[0].signs: must be an array of texts, or one text with commas"),
    ],
)
def test_faults(text: str, expected: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology(NODE + text, "f", 0.0)
    assert [expected in str(fault) for fault in caught.value.faults] == [True]
