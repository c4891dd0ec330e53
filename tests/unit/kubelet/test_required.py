"""The CDI device that holds back what the kubelet gave: when it is answered, and who takes it off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import Container
from nri_gpu.domain.kubelet import REQUIRED_DESTINATION, REQUIRED_SOURCE
from nri_gpu.kubelet.answer import FILE_NAME, NO_RUNTIME, TOO_OLD, RequiredDevice
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.kubelet import FailClosed, KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.policy.parse import parse_policy
from nri_gpu.ttrpc.events import Status
from tests.support import builders
from tests.support.builders import uuid
from tests.unit.kubelet.station import GPU, Halves, again, from_kubelet

NAME = "gpu.nri.io/daemon=required"


def configured(timeout_ms: int) -> Configured:
    return Configured(runtime="containerd", version="v2.1.9", nri_version="", request_timeout_ms=timeout_ms, config="")


def device(folder: Path, mode: FailClosed = FailClosed.AUTO) -> RequiredDevice:
    return RequiredDevice(KubeletSettings(enabled=True, fail_closed=mode, cdi_dir=str(folder)))


def test_it_is_answered_once_the_runtime_is_known_to_take_mounts_away(tmp_path: Path) -> None:
    required = device(tmp_path / "cdi")
    assert (required.name(), required.fault()) == ("", NO_RUNTIME)
    required.configured(configured(0))
    assert (required.name(), required.fault()) == ("", TOO_OLD)
    required.configured(configured(2000))
    assert (required.name(), required.fault()) == (NAME, "")
    specification = json.loads((tmp_path / "cdi" / FILE_NAME).read_text())
    kind, _, name = NAME.partition("=")
    assert (specification["kind"], specification["devices"][0]["name"]) == (kind, name)
    (mount,) = specification["devices"][0]["containerEdits"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == (REQUIRED_SOURCE, REQUIRED_DESTINATION)
    assert not Path(REQUIRED_SOURCE).exists()
    with pytest.raises(OSError, match="No such file"):  # nobody can make it so
        Path(REQUIRED_SOURCE).mkdir()


def test_a_specification_that_was_removed_is_back_before_its_name_is_answered(tmp_path: Path) -> None:
    required = device(tmp_path)
    required.configured(configured(2000))
    assert required.name() == NAME
    (tmp_path / FILE_NAME).unlink()
    assert required.name() == NAME
    assert (tmp_path / FILE_NAME).exists()


def test_without_a_folder_to_write_to_only_the_guard_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    required = device(tmp_path / "file" / "cdi")
    required.configured(configured(2000))
    assert required.name() == ""
    assert "cannot be written" in required.fault()


def test_policy_can_leave_it_to_the_guard(tmp_path: Path) -> None:
    required = device(tmp_path, FailClosed.GUARD)
    required.configured(configured(2000))
    required.write()
    assert (required.name(), list(tmp_path.iterdir())) == ("", [])
    assert "kubelet.fail_closed" in required.fault()


def given(halves: Halves, index: int, *, held_back: bool = True) -> Container:
    """A container as it comes with what Allocate answered."""
    (answer,) = halves.offers.allocate(GPU, [[uuid(index)]])
    assert answer.cdi_device == NAME
    return replace(from_kubelet(answer.annotations), mounts=frozenset({REQUIRED_DESTINATION} if held_back else ()))


def removed(halves: Halves, of: Container) -> list[str]:
    """Mounts that our reply takes away."""
    reply = halves.plugin.create_container(builders.create_payload(of))
    assert isinstance(reply, bytes)
    mounts = pb.CreateContainerResponse.FromString(reply).adjust.mounts
    return [mount.destination for mount in mounts if mount.destination.startswith("-")]


def required_halves(folder: Path, policy: Policy | None = None) -> Halves:
    halves = Halves(policy, KubeletSettings(enabled=True, cdi_dir=str(folder)))
    halves.required.configured(configured(2000))
    return halves


def test_our_reply_lets_it_start_and_says_so_of_no_other(tmp_path: Path) -> None:
    halves = required_halves(tmp_path)
    first = given(halves, 0)
    assert removed(halves, first) == [f"-{REQUIRED_DESTINATION}"]
    assert removed(halves, again(first)) == [f"-{REQUIRED_DESTINATION}"]
    assert not halves.plugin.kubelet.unapplied
    # Allocated by a version of us that knew no such device.
    assert removed(halves, replace(again(first), mounts=frozenset())) == []


def test_a_runtime_that_leaves_it_out_is_noticed(tmp_path: Path) -> None:
    halves = required_halves(tmp_path)
    assert removed(halves, given(halves, 0, held_back=False)) == []
    assert halves.plugin.kubelet.unapplied
    removed(halves, given(halves, 1))
    assert not halves.plugin.kubelet.unapplied


def test_what_policy_ignores_is_refused_with_its_reason_instead_of_the_runtimes(tmp_path: Path) -> None:
    halves = required_halves(tmp_path, parse_policy({"namespaces": {"allow": [], "otherwise": "ignore"}}, "x"))
    reply = halves.plugin.create_container(builders.create_payload(given(halves, 0)))
    assert isinstance(reply, Status)
    assert "[not-allowed]: the kubelet gave it GPUs, but namespace" in reply.message
