"""What stands on a container is worth what its signature is, and the pod's annotation only shapes it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.reservations import OPEN_S
from nri_gpu.decision.claim import needs_grant
from nri_gpu.domain.codec import canonical, decode, encode
from nri_gpu.domain.container import Container
from nri_gpu.domain.kubelet import Allocated, AllocationInvalid
from nri_gpu.domain.names import KUBELET_KEY
from nri_gpu.kubelet.answer import KEY_FILE, TokenKey, read_tokens, token_key, write_token
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.policy.model import Policy
from nri_gpu.policy.parse import parse_policy
from tests.support.builders import container, gpus, mig_gpu, pod, uuid
from tests.unit.kubelet.station import GPU, TOKENS, Halves, again, from_kubelet

KEY = token_key(GPU)


def token(*indices: int, key: bytes = TOKENS, shared: bool = False) -> dict[str, str]:
    return {KEY: write_token(GPU, [uuid(index) for index in indices], key, shared=shared)}


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


@pytest.mark.parametrize("annotations", FORGED.values(), ids=FORGED)
def test_a_forged_one_is_worth_nothing(annotations: dict[str, str]) -> None:
    assert isinstance(read_tokens(annotations, TOKENS), AllocationInvalid)
    halves = Halves()
    if not all(value.isascii() for value in annotations.values()):
        return  # protobuf carries no such text
    refused = halves.create(from_kubelet(annotations))
    assert isinstance(refused, str)
    assert refused.startswith("nri-gpu [bad-request]: gpu.nri.io/kubelet")
    assert "delete the pod" in refused
    assert not halves.plugin.ledger.entries


def test_a_pods_author_cannot_write_one() -> None:
    """A runtime may be told to copy pods' annotations to containers: a stolen one that is good is refused as well."""
    halves = Halves()
    stolen = token(0)
    for own in ({}, stolen):
        thief = replace(container(of=pod("thief", annotations=stolen)), annotations=own)
        assert "unknown annotation" in str(halves.create(thief))


def test_the_answer_is_handed_out_again_after_a_reboot() -> None:
    halves = Halves()
    halves.restart_daemon()
    assert halves.create(from_kubelet(token(2, 1))) == (uuid(1), uuid(2))


def test_ids_that_are_gone_are_named() -> None:
    halves = Halves()
    halves.put_gpus(gpus(2))
    gone = str(halves.create(from_kubelet(token(3))))
    assert f"no-such-gpu]: this node has no GPU '{uuid(3)}'" in gone
    assert "delete the pod" in gone  # to ask for another is not the pod's to do
    halves.put_gpus([mig_gpu(3)])
    lost = str(halves.create(from_kubelet(token(3))))
    assert "gpu-unavailable" in lost
    assert "delete the pod" in lost


def test_without_the_kubelets_half_it_says_so() -> None:
    halves = Halves()
    halves.plugin.kubelet.key = None
    assert "--kubelet" in str(halves.create(from_kubelet(token(0))))


SHAPES = {
    "all": "",
    "all;capabilities=compute,utility": "",
    "1": "",
    "2;mode=exclusive": "",
    "model=*A100*": "",
    "capabilities=compute": "",
    "mode=exclusive": "",
    "capabilities=compute;model=*H100*": "does not fit the selectors",
    "3": "asks for 3 GPUs and the kubelet gave 2",
    "device=0": "write all",
    "mig=1g.5gb": "write all",
    "all;mode=shared": "the kubelet gave in exclusive mode",
    "all;model=*H100*": "does not fit the selectors",
    "some": "unknown",
}


def test_what_only_shapes_asks_for_nothing_where_the_kubelet_gave_nothing() -> None:
    beside = container(of=pod("sidecar", annotations={"gpu.nri.io": "capabilities=compute"}))
    assert "the kubelet gave this container none: write one of" in str(Halves().create(beside))


@pytest.mark.parametrize(("claim", "refused"), SHAPES.items(), ids=SHAPES)
def test_the_annotation_only_shapes(claim: str, refused: str) -> None:
    made = Halves().create(from_kubelet(token(0, 3), claim=claim))
    if refused:
        assert refused in str(made)
    else:
        assert made == (uuid(0), uuid(3))


def test_a_recorded_request_says_what_the_kubelet_gave() -> None:
    """So that `nri-gpu replay` decides it again; the signature is for nobody's log."""
    of = Halves().plugin.kubelet.read(from_kubelet(token(0, 3)))
    assert isinstance(of.kubelet, Allocated)
    assert of.kubelet.uuids == (uuid(0), uuid(3))
    assert decode(Container, encode(of)) == of
    assert "mac=" not in canonical(of)


def test_none_is_none() -> None:
    assert Halves().create(from_kubelet(token(0), claim="none")) == ()


def test_the_guard_knows_that_it_asked() -> None:
    assert needs_grant(from_kubelet(token(0)), Policy.default()) == KEY
    assert needs_grant(from_kubelet(FORGED["nothing"]), Policy.default()) == KEY
    assert needs_grant(container(), Policy.default()) == ""


def test_one_that_no_list_had_is_still_the_kubelets() -> None:
    """Created while a Synchronize was under way; its GPU would be unhealthy for as long as it runs."""
    halves = Halves()
    annotations = halves.allocate(uuid(0))
    of = from_kubelet(annotations)
    halves.create(of)
    halves.restarted({})
    assert halves.start(replace(of, annotations={**of.annotations, **halves.marks[of.id]}))
    assert not any(device.why for device in halves.offers.devices(GPU))


def test_a_promise_is_not_for_ever() -> None:
    halves = Halves()
    halves.allocate(uuid(0))
    assert "kubelet/nvidia.com/gpu" in str(halves.create(container("device=0")))
    halves.clock.now += OPEN_S + 100
    assert halves.create(container("device=0")) == (uuid(0),)


def test_the_kubelets_last_word_about_an_id_counts() -> None:
    """The pod before was given up; its container's promise must not be in the way of the next pod's."""
    halves = Halves()
    annotations = halves.allocate(uuid(0))
    first = from_kubelet(annotations, pod="one")
    halves.create(first)
    halves.start(first)
    halves.stop(first)
    assert "ml/one" in str(halves.create(from_kubelet(annotations, pod="two")))  # not before it was given anew
    halves.allocate(uuid(0))
    assert halves.create(again(from_kubelet(annotations, pod="two"))) == (uuid(0),)


def test_a_refused_container_finds_its_promise_when_it_comes_again() -> None:
    halves = Halves()
    annotations = halves.allocate(uuid(0))
    assert "asks for 2" in str(halves.create(from_kubelet(annotations, claim="2")))
    assert "kubelet/nvidia.com/gpu" in str(halves.create(container("device=0", of="thief")))
    assert halves.create(again(from_kubelet(annotations))) == (uuid(0),)


def test_a_pool_divides_the_node() -> None:
    policy = parse_policy({"pool": [{"name": "cluster", "device": ["0", "1"]}], "kubelet": {"pool": "cluster"}}, "x")
    halves = Halves(policy)
    assert [device.id for device in halves.offers.devices(GPU)] == [uuid(0), uuid(1)]
    assert halves.create(container("2", of="local")) == (uuid(2), uuid(3))
    assert "not offered here" in str(halves.create(container("device=0", of="more")))
    annotations = halves.allocate(uuid(0))
    assert halves.create(from_kubelet(annotations)) == (uuid(0),)


def test_what_policy_refuses_for_its_age_is_not_offered() -> None:
    halves = Halves(parse_policy({"inventory": {"stale": "refuse", "stale_after_s": 100}}, "x"))
    assert not any(device.why for device in halves.offers.devices(GPU))
    halves.age_s = 101.0
    assert all(device.why for device in halves.offers.devices(GPU))


def test_replicas_of_one_gpu_are_one() -> None:
    halves = Halves(settings=KubeletSettings(replicas=2))
    annotations = halves.allocate(f"{uuid(1)}::1", f"{uuid(1)}::0")
    assert halves.create(from_kubelet(annotations)) == (uuid(1),)


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
    for mode in (0o644, 0o640, 0o602):
        file.chmod(mode)
        fresh = running.look()  # whoever read it can forge, and whoever wrote it
        assert fresh not in (None, key)
        assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (fresh, 0o600)
        key = fresh
    file.write_bytes(b"short")
    assert len(TokenKey(folder).look() or b"") == 32
