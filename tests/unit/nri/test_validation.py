"""ValidateContainerAdjustment read and answered; which requests are not even decoded."""

from __future__ import annotations

from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Added, AddedNode
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.nri.convert import request_from_pb
from nri_gpu.nri.validation import adjusted_from_pb, concerns_us, verdict_to_pb
from tests.support import nri_messages as nri

US: Final = "10-nri-gpu"


def reply(**adjust: object) -> pb.CreateContainerResponse:
    return pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(**adjust))  # type: ignore[arg-type] # its fields


def device(path: str, major: int = 195, minor: int = 0) -> pb.LinuxContainerAdjustment:
    return pb.LinuxContainerAdjustment(devices=[pb.LinuxDevice(path=path, type="c", major=major, minor=minor)])


def opening(major: int, kind: str = "c", *, allow: bool = True) -> pb.LinuxContainerAdjustment:
    rule = pb.LinuxDeviceCgroup(allow=allow, type=kind, major=pb.OptionalInt64(value=major), access="rw")
    return pb.LinuxContainerAdjustment(resources=pb.LinuxResources(devices=[rule]))


def test_everything_with_its_owner() -> None:
    of = nri.asking("1")
    made = nri.container(of)
    ours = reply(annotations={GRANT_KEY: "v1"}, linux=device("/dev/nvidia3", minor=3))
    theirs = reply(linux=device("/dev/fuse", 10, 229), CDI_devices=[pb.CDIDevice(name="nvidia.com/gpu=0")])
    adjusted = adjusted_from_pb(nri.validate(of, made, {US: ours, "20-x": theirs}), GRANT_KEY)
    assert adjusted.container == request_from_pb(nri.create(of, made))
    assert adjusted.grant == Added("v1", US)
    assert adjusted.nodes == (AddedNode("/dev/nvidia3", US, 195, 3), AddedNode("/dev/fuse", "20-x", 10, 229))
    assert adjusted.cdi_devices == (Added("nvidia.com/gpu=0", "20-x"),)
    assert adjusted.opened == frozenset()


def test_a_block_device_with_a_gpus_numbers_is_no_node_of_it() -> None:
    of = nri.pod()
    disk = pb.LinuxDevice(path="/dev/nvidia0", type="b", major=195, minor=0)
    theirs = reply(linux=pb.LinuxContainerAdjustment(devices=[disk]))
    assert adjusted_from_pb(nri.validate(of, nri.container(of), {"20-x": theirs}), GRANT_KEY).nodes == ()


def test_a_runtime_that_names_no_owners() -> None:
    of = nri.asking("1")
    request = pb.ValidateContainerAdjustmentRequest.FromString(
        nri.validate(of, nri.container(of), {US: reply(annotations={GRANT_KEY: "v1"}, linux=device("/dev/nvidia0"))})
    )
    request.ClearField("owners")
    adjusted = adjusted_from_pb(request.SerializeToString(), GRANT_KEY)
    assert adjusted.grant == Added("v1", "")
    assert [node.owner for node in adjusted.nodes] == [""]


@pytest.mark.parametrize(
    ("rule", "opened"),
    [
        (opening(195), {195}),
        (opening(195, ""), {195}),
        (opening(195, "a"), {195}),
        (opening(195, "b"), set()),
        (opening(195, allow=False), set()),
    ],
)
def test_rules_of_the_device_cgroup(rule: pb.LinuxContainerAdjustment, opened: set[int]) -> None:
    of = nri.pod()
    payload = nri.validate(of, nri.container(of), {US: reply(linux=rule)})
    assert concerns_us(payload)
    assert adjusted_from_pb(payload, GRANT_KEY).opened == opened


@pytest.mark.parametrize(
    ("adjusted", "concerns"),
    [
        (reply(), False),
        (reply(env=[pb.KeyValue(key="A", value="b")], linux=device("/dev/fuse", 10, 229)), False),
        (reply(linux=device("/dev/nvidia0")), True),
        (reply(linux=device("/dev/harmless")), True),
        (reply(linux=device("/dev/nvidia-uvm", 511)), True),
        (reply(CDI_devices=[pb.CDIDevice(name="nvidia.com/gpu=0")]), True),
        (reply(linux=opening(195)), True),
    ],
)
def test_what_is_not_worth_decoding(adjusted: pb.CreateContainerResponse, concerns: bool) -> None:
    of = nri.pod()
    assert concerns_us(nri.validate(of, nri.container(of), {"20-x": adjusted})) is concerns
    asking = nri.asking("1")
    assert concerns_us(nri.validate(asking, nri.container(asking), {"20-x": adjusted}))


def test_a_verdict_is_silence_or_a_rejection_in_one_line() -> None:
    assert verdict_to_pb(None) == b""
    verdict = pb.ValidateContainerAdjustmentResponse.FromString(verdict_to_pb(Reason(Code.NOT_GRANTED, "no\n.")))
    assert verdict.reject
    assert verdict.reason == "nri-gpu [not-granted]: no?."
