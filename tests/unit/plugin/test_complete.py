"""A completed container in the ledger: a foreign holder of its GPUs, with a mark of ours that names none of them."""

from __future__ import annotations

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.nri import convert
from nri_gpu.nri.events import Event
from nri_gpu.policy.model import Complete, ForeignSettings, Policy
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import Bench
from tests.unit.plugin.test_handlers import create, synchronize, tell

ALL = Policy(foreign=ForeignSettings(complete=Complete.ALL))
ASKED = Policy(foreign=ForeignSettings(complete=Complete.ASKED))


def plugged(of: pb.PodSandbox, index: int = 1) -> pb.Container:
    """With a GPU's node from a device plugin."""
    made = nri.container(of)
    made.linux.devices.add(path=f"/dev/nvidia{index}", type="c", major=195, minor=index)
    return made


def holders(bench: Bench) -> dict[str, set[str]]:
    return {other.pod: set(other.uuids) for other in bench.plugin.ledger.external.values()}


@pytest.mark.parametrize(("policy", "asked"), [(ALL, False), (ASKED, True)], ids=["unasked", "asked"])
def test_its_life(policy: Policy, asked: bool, log: Log) -> None:
    bench = Bench(policy)
    of = nri.asking("1") if asked else nri.pod()
    made = plugged(of)
    reply = create(bench, of, made)
    uuid = bench.node.gpus[1].uuid
    assert {device.path for device in reply.adjust.linux.devices} == {
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    }
    assert reply.adjust.annotations[GRANT_KEY].startswith("v1;mode=none;uuid=;gen=580.95.05-test;mac=")
    assert log.one("container completed for GPUs that others gave it").fields["gpu_uuid"] == uuid
    assert holders(bench) == {"ml/train": {uuid}}
    assert bench.plugin.ledger.generations() == {"580.95.05-test"}
    after = nri.adjusted(made, reply)

    assert tell(bench, Event.START_CONTAINER, of, after) == b""
    assert holders(bench) == {"ml/train": {uuid}}

    exclusive = nri.asking("device=1; mode=exclusive", "other")
    reply_to_other = bench.plugin.create_container(nri.create(exclusive, nri.container(exclusive)))
    assert isinstance(reply_to_other, Status)
    assert "[gpu-busy]" in reply_to_other.message

    restarted = Bench(policy)
    synchronize(restarted, [of], [nri.running(after)])
    assert restarted.plugin.ledger == bench.plugin.ledger
    assert not log.warnings()

    assert tell(bench, Event.STOP_CONTAINER, of, after) == b""
    assert (holders(bench), dict(bench.plugin.ledger.entries)) == ({}, {})


def test_one_that_no_synchronize_listed_is_taken_up_at_its_start() -> None:
    first = Bench(ALL)
    of = nri.pod()
    after = nri.adjusted(plugged(of), create(first, of, plugged(of)))
    bench = Bench(ASKED)
    of.annotations["gpu.nri.io"] = "1"
    assert tell(bench, Event.START_CONTAINER, of, after) == b""
    assert holders(bench) == {"ml/train": {bench.node.gpus[1].uuid}}


def test_who_holds_nothing_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "request_from_pb", None)
    bench = Bench(ALL)
    of = nri.pod()
    assert bench.plugin.create_container(nri.create(of, nri.container(of))) == b""


def test_by_default_a_device_plugins_container_is_left_as_it_is() -> None:
    bench = Bench()
    of = nri.pod()
    assert bench.plugin.create_container(nri.create(of, plugged(of))) == b""
    assert holders(bench) == {"ml/train": {bench.node.gpus[1].uuid}}
