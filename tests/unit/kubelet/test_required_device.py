"""Tokens and the required CDI device: what each is worth on a container, and when it is answered."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.decision.asked import needs_grant
from nri_gpu.domain.allocation import REQUIRED_DESTINATION, REQUIRED_SOURCE, Allocated, AllocationInvalid
from nri_gpu.domain.container import Container
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.domain.value import canonical
from nri_gpu.kubelet.allocations import by_tokens
from nri_gpu.kubelet.required_device import (
    FILE_NAME,
    KEY_FILE,
    NO_RUNTIME,
    TOO_OLD,
    RequiredDevice,
    TokenKey,
    read_tokens,
    token_key,
)
from nri_gpu.nri.convert import Configured
from nri_gpu.policy.kubelet_settings import FailClosed, KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from nri_gpu.records.audit_records import container_json, container_of
from nri_gpu.ttrpc.frames import Status
from tests.support import builders
from tests.support.builders import container, gpus, mig_gpu, pod, uuid
from tests.support.kubelet_nodes import GPU, TOKENS, PluginNode, again, from_kubelet, token

KEY = token_key(GPU)
FORGED = {
    "another key": token(0, key=bytes(32)),
    "another id": {KEY: token(0)[KEY].replace(uuid(0), uuid(1))},
    "one id more": {KEY: token(0)[KEY].replace(uuid(0), f"{uuid(0)},{uuid(1)}")},
    "another mode": {KEY: token(0)[KEY].replace("exclusive", "shared")},
    "under another resource": {token_key("nvidia.com/mig-1g.5gb"): token(0)[KEY]},
    "no resource": {KUBELET_KEY: token(0)[KEY]},
    "nothing": {KEY: ""},
    "no mac": {KEY: "v1;resource=nvidia.com/gpu;mode=exclusive;ids=GPU-1"},
    "another script": {KEY: "v1;mac=\u00e9\udc80"},
    "one good, one bad": {**token(0), token_key("nvidia.com/x"): "v1"},
    "a later version": {KEY: token(0)[KEY].replace("v1;", "v2;")},
}


def test_a_token_is_as_earlier_versions_wrote_it() -> None:
    """The kubelet's checkpoint outlives the daemon, and the machine's boots."""
    assert token(0)[KEY] == (
        f"v1;resource=nvidia.com/gpu;mode=exclusive;ids={uuid(0)};"
        "mac=72c08734f85ee019e0b3281baaeae67f7353c84f6c04c2d1b06a11210c4f6968"
    )


@pytest.mark.parametrize("annotations", FORGED.values(), ids=FORGED)
def test_a_forged_one_is_worth_nothing(annotations: dict[str, str]) -> None:
    assert isinstance(read_tokens(annotations, TOKENS), AllocationInvalid)
    node = PluginNode()
    if not all(value.isascii() for value in annotations.values()):
        return  # protobuf carries no such text
    refused = node.create(from_kubelet(annotations))
    assert isinstance(refused, str)
    assert refused.startswith("nri-gpu [bad-request]: gpu.nri.io/kubelet")
    assert "delete the pod" in refused
    assert not node.plugin.ledger.entries


def test_a_pods_author_cannot_write_one() -> None:
    """A runtime may be told to copy pods' annotations to containers: a stolen one that is good is refused as well."""
    node = PluginNode()
    stolen = token(0)
    for own in ({}, stolen):
        thief = replace(container(of=pod("thief", annotations=stolen)), annotations=own)
        assert "unknown annotation" in str(node.create(thief))


def test_ids_that_are_gone_are_named() -> None:
    node = PluginNode()
    node.put_gpus(gpus(2))
    gone = str(node.create(from_kubelet(token(3))))
    assert f"no-such-gpu]: this node has no GPU '{uuid(3)}'" in gone
    assert "delete the pod" in gone  # to ask for another is not the pod's to do
    node.put_gpus([mig_gpu(3)])
    lost = str(node.create(from_kubelet(token(3))))
    assert "gpu-unavailable" in lost
    assert "delete the pod" in lost


def test_a_second_pod_with_a_devices_id_is_told_who_has_it_and_what_helps() -> None:
    node = PluginNode()
    assert node.create(from_kubelet(token(0), pod="first")) == (uuid(0),)
    assert str(node.create(from_kubelet(token(0), pod="second"))) == (
        f"nri-gpu [gpu-busy]: GPU 0 ({uuid(0)}) is held exclusively by ml/first, and the kubelet allocated it to this "
        "pod too, in exclusive mode: wait until it is free, or delete the pod, or all pods that use its "
        "ResourceClaim, so that its replacement gets another GPU."
    )


def test_without_the_kubelets_half_it_says_so() -> None:
    node = PluginNode()
    node.plugin.kubelet.key = None
    assert "--kubelet" in str(node.create(from_kubelet(token(0))))


SHAPES = {
    "all": "",
    "all;capabilities=compute,utility": "",
    "1": "",
    "2;mode=exclusive": "",
    "model=*A100*": "",
    "capabilities=compute": "",
    "mode=exclusive": "",
    "capabilities=compute;model=*H100*": "drop the selectors, or delete the pod",
    "3": "asks for 3 GPUs, but the kubelet allocated 2",
    "device=0": "write all",
    "mig=1g.5gb": "write all",
    "all;mode=shared": "the kubelet allocated in exclusive mode",
    "all;model=*H100*": "does not fit the selectors",
    "some": "unknown",
}


def test_what_only_shapes_asks_for_nothing_where_the_kubelet_gave_nothing() -> None:
    beside = container(of=pod("sidecar", annotations={"gpu.nri.io": "capabilities=compute"}))
    assert "the kubelet allocated none to this container: write one of" in str(PluginNode().create(beside))


@pytest.mark.parametrize(("claim", "refused"), SHAPES.items(), ids=SHAPES)
def test_the_annotation_only_shapes(claim: str, refused: str) -> None:
    made = PluginNode().create(from_kubelet(token(0, 3), claim=claim))
    if refused:
        assert refused in str(made)
    else:
        assert made == (uuid(0), uuid(3))


def test_a_recorded_request_says_what_the_kubelet_gave() -> None:
    """So that `nri-gpu replay` decides it again; the signature is for nobody's log."""
    of = by_tokens(from_kubelet(token(0, 3)), TOKENS)
    assert isinstance(of.kubelet, Allocated)
    assert of.kubelet.uuids == (uuid(0), uuid(3))
    assert container_of(container_json(of)) == of
    assert "mac=" not in canonical(of)


def test_none_is_none() -> None:
    assert PluginNode().create(from_kubelet(token(0), claim="none")) == ()


def test_the_guard_knows_that_it_asked() -> None:
    assert needs_grant(from_kubelet(token(0)), Policy.default()) == KEY
    assert needs_grant(from_kubelet(FORGED["nothing"]), Policy.default()) == KEY
    assert needs_grant(container(), Policy.default()) == ""


def test_the_key_lives_beside_the_kubelets_checkpoint(folder: Path) -> None:
    file, running = folder / KEY_FILE, TokenKey(folder)
    key = running.look()
    assert key is not None
    assert len(key) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (running.look(), TokenKey(folder).look()) == (None, key)
    file.unlink()
    assert running.look() is None  # the folder was made anew beneath a running daemon
    assert file.read_bytes() == key
    file.write_bytes(b"short")  # damaged, and read by nobody else
    assert running.look() is None
    assert file.read_bytes() == key
    for mode in (0o644, 0o640, 0o602):
        file.chmod(mode)
        fresh = running.look()  # whoever read it can forge, and whoever wrote it
        assert fresh not in (None, key)
        assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (fresh, 0o600)
        key = fresh
    file.write_bytes(b"short")
    assert len(TokenKey(folder).look() or b"") == 32


NAME = "gpu.nri.io/daemon=required"


def configured(timeout_ms: int) -> Configured:
    return Configured(runtime="containerd", version="v2.1.9", nri_version="", request_timeout_ms=timeout_ms, config="")


def device(folder: Path, mode: FailClosed = FailClosed.AUTO) -> RequiredDevice:
    return RequiredDevice(KubeletSettings(enabled=True, fail_closed=mode, cdi_dir=str(folder)))


# --- the required CDI device -----------------------------------------------------------------------------------------


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


def held_back(node: PluginNode, index: int, *, mounted: bool = True) -> Container:
    """A container as it comes with what Allocate answered."""
    (answer,) = node.devices.allocate(GPU, [[uuid(index)]])
    assert answer.cdi_device == NAME
    return replace(from_kubelet(answer.annotations), mounts=frozenset({REQUIRED_DESTINATION} if mounted else ()))


def removed(node: PluginNode, of: Container) -> list[str]:
    """Mounts that our reply takes away."""
    reply = node.plugin.create_container(builders.create_payload(of))
    assert isinstance(reply, bytes)
    mounts = pb.CreateContainerResponse.FromString(reply).adjust.mounts
    return [mount.destination for mount in mounts if mount.destination.startswith("-")]


def required_node(folder: Path, policy: Policy | None = None) -> PluginNode:
    node = PluginNode(policy, KubeletSettings(enabled=True, cdi_dir=str(folder)))
    node.required.configured(configured(2000))
    return node


def test_our_reply_lets_it_start_and_says_so_of_no_other(tmp_path: Path) -> None:
    node = required_node(tmp_path)
    first = held_back(node, 0)
    assert removed(node, first) == [f"-{REQUIRED_DESTINATION}"]
    assert removed(node, again(first)) == [f"-{REQUIRED_DESTINATION}"]
    assert not node.plugin.kubelet.unapplied
    # Allocated by a version of us that knew no such device.
    assert removed(node, replace(again(first), mounts=frozenset())) == []


def test_a_runtime_that_leaves_it_out_is_noticed(tmp_path: Path) -> None:
    node = required_node(tmp_path)
    assert removed(node, held_back(node, 0, mounted=False)) == []
    assert node.plugin.kubelet.unapplied
    removed(node, held_back(node, 1))
    assert not node.plugin.kubelet.unapplied


@pytest.mark.parametrize("claim", ["1", "none"])
def test_a_mount_that_a_tenant_made_at_its_place_hides_no_such_runtime(tmp_path: Path, claim: str) -> None:
    node = required_node(tmp_path)
    removed(node, held_back(node, 0, mounted=False))
    theirs = container(claim, of="theirs", mounts=frozenset({REQUIRED_DESTINATION}))
    assert removed(node, theirs) == [f"-{REQUIRED_DESTINATION}"]
    assert node.plugin.kubelet.unapplied


def test_what_policy_ignores_is_refused_with_its_reason_instead_of_the_runtimes(tmp_path: Path) -> None:
    node = required_node(tmp_path, parse_policy({"namespaces": {"allow": [], "otherwise": "ignore"}}, "x"))
    reply = node.plugin.create_container(builders.create_payload(held_back(node, 0)))
    assert isinstance(reply, Status)
    assert "[not-allowed]: the kubelet allocated GPUs to it, but namespace" in reply.message
