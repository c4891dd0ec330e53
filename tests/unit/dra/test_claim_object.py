"""What is read of a ResourceClaim, and the sentences about those that cannot be prepared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nri_gpu.domain.container import PodUid
from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimUid, usable_uid
from nri_gpu.dra.claim_object import BYTES_MAX, ResourceClaimError, parse_resource_claim, unserved
from nri_gpu.dra.questions import PreparedName
from tests.support.resource_claims import (
    CONFIG,
    DRIVER,
    NODE,
    POD,
    UID,
    consumer,
    document,
    opaque,
    resource_claim,
    result,
)

ASKED = PreparedName(ClaimUid(UID), "ml", "train")
SHARED = {**CONFIG, "mode": "shared"}
MPS = {**CONFIG, "mode": "mps"}


def parsed(claim: dict[str, Any], asked: PreparedName = ASKED) -> AllocatedClaim:
    return parse_resource_claim(document(claim), asked, DRIVER, NODE)


def fault(claim: dict[str, Any] | bytes, asked: PreparedName = ASKED) -> ResourceClaimError:
    raw = claim if isinstance(claim, bytes) else document(claim)
    with pytest.raises(ResourceClaimError) as caught:
        parse_resource_claim(raw, asked, DRIVER, NODE)
    assert str(caught.value).startswith("ResourceClaim ml/train: ")
    return caught.value


def test_only_the_results_of_our_driver_are_read_with_their_pods() -> None:
    other = {**result("nic-0"), "driver": "dra.net"}
    mine = result("gpu-3", "gpus", adminAccess=True, shareID="s-1", tolerations=[{"key": "x"}])
    read = parsed(resource_claim(other, mine, pods={POD: "web", "pod-2": "api"}, owner="Pod"))
    assert read == AllocatedClaim(
        uid=ClaimUid(UID),
        namespace="ml",
        name="train",
        pods={PodUid(POD): "web", PodUid("pod-2"): "api"},
        results=(AllocatedResult(request="gpus", pool="node-1", device="gpu-3", share_id="s-1", admin=True),),
        owned=True,
    )


def test_a_claim_that_stands_by_itself_or_belongs_to_a_group_is_not_owned_by_one_pod() -> None:
    assert not parsed(resource_claim()).owned
    assert not parsed(resource_claim(owner="PodGroup")).owned


def test_pods_and_pod_groups_may_have_it_and_every_other_kind_is_named() -> None:
    claim = resource_claim(groups={"g-1": "gang"})
    assert unserved(parsed(claim)) == ""
    kinds = [("pods", "metrics.k8s.io"), ("podgroups", ""), ("jobs", "batch")]
    claim["status"]["reservedFor"] += [consumer(*kinds[at % 3], uid=f"u-{at}") for at in range(298)]
    read = parsed(claim)
    assert (read.pods, read.groups) == ({POD: "web"}, {"g-1": "gang"})
    assert "it is reserved for jobs.batch, podgroups, pods.metrics.k8s.io, and only pods and PodGroups" in unserved(
        read
    )


def test_kinds_that_are_many_long_or_odd_fit_into_a_sentence() -> None:
    claim = resource_claim(pods={})
    claim["status"]["reservedFor"] = [consumer(f"{at}\n" + "ä" * 500, uid=f"u-{at}") for at in range(300)]
    sentence = unserved(parsed(claim))
    assert sentence.isascii()
    assert "and 296 more" in sentence
    assert len(sentence) < 600


def texts(*config: dict[str, Any], requests: tuple[str, ...] = ("gpu",)) -> tuple[str, ...]:
    results = [result(f"gpu-{at}", request) for at, request in enumerate(requests)]
    return tuple(each.text for each in parsed(resource_claim(*results, config=list(config))).results)


def test_a_configuration_applies_to_the_requests_that_it_names_or_to_all() -> None:
    requests = ("a", "b", "c/large", "c/small")
    assert texts(opaque(SHARED), requests=requests) == ("mode=shared",) * 4
    assert texts(opaque(SHARED, "a", "c"), requests=requests) == ("mode=shared", "", "mode=shared", "mode=shared")
    assert texts(opaque(SHARED, "c/small"), requests=requests) == ("", "", "", "mode=shared")


def test_a_claim_prevails_over_its_class_and_of_one_source_the_last() -> None:
    of_class = opaque(SHARED, source="FromClass")
    assert texts(opaque(MPS), of_class) == ("mode=mps",)
    assert texts(of_class, opaque(MPS, source="FromClass")) == ("mode=mps",)
    assert texts(of_class, opaque(MPS, "other")) == ("mode=shared",)
    assert texts(of_class, opaque(CONFIG)) == ("",)


def test_the_configuration_of_another_driver_is_not_looked_at() -> None:
    assert texts(opaque({"kind": "Nic"}, driver="dra.net"), {"source": "FromClaim"}) == ("",)


@pytest.mark.parametrize("driver", ["gpu.nvidia.com", DRIVER])
def test_a_configuration_of_ten_kibibytes_that_nests_thousands_deep_is_a_sentence(driver: str) -> None:
    """As much as the API server takes. Python 3.13 reads as deep: then ours is none, and others are passed over."""
    deep = document(resource_claim(config=[opaque("deep", driver=driver)]))
    for nested in (b"[" * 5000 + b"]" * 5000, b'{"a":' * 1700 + b"1" + b"}" * 1700):
        try:
            read = parse_resource_claim(deep.replace(b'"deep"', nested), ASKED, DRIVER, NODE)
        except ResourceClaimError as error:
            said = ("make the opaque configurations of its drivers flatter", "apiVersion: it is missing")
            assert any(each in str(error) for each in said), error
            assert not error.over
        else:
            assert driver != DRIVER
            assert [each.text for each in read.results] == [""]


def test_all_faulty_configurations_are_named_by_source_and_field() -> None:
    wrong = {**CONFIG, "mode": "share", "x": 1}
    error = fault(resource_claim(config=[opaque(wrong, source="FromClass"), opaque({})]))
    assert 'config[0] (FromClass): "x" is no field' in str(error)
    assert 'mode: unknown mode "share"' in str(error)
    assert "config[1] (FromClaim): apiVersion: it is missing: write gpu.nri.io/v1" in str(error)
    assert not error.over


def test_a_claim_that_has_nothing_of_ours_any_more_is_over() -> None:
    made_anew = fault(resource_claim(uid="another"))
    assert "metadata.uid: it was deleted, and another claim was created with its name" in str(made_anew)
    freed = resource_claim()
    del freed["status"]["allocation"]
    assert "status.allocation: nothing is allocated to it" in str(fault(freed))
    bare = fault(document({"metadata": {"uid": UID}}))
    foreign = fault(resource_claim({**result(), "driver": "dra.net"}))
    assert "none is of the driver gpu.nri.io" in str(foreign)
    elsewhere = fault(resource_claim(result(pool="node-2")))
    assert "none is of the driver gpu.nri.io on node-1" in str(elsewhere)
    assert all(error.over for error in (made_anew, fault(freed), bare, foreign, elsewhere))


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"metadata": {"uid": "\xff"}}', "cannot be read"),
        (b'{"metadata": {"uid": 5}}', "`$.metadata.uid`"),
        (b" " * (BYTES_MAX + 1), "over the limit"),
        (json.dumps({"metadata": {"uid": UID}, "status": {"allocation": {"devices": {"results": [{}]}}}}).encode(),
         "`$.status.allocation.devices.results[0]`"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_claim_is_a_fault_that_says_where(raw: bytes, sentence: str) -> None:
    error = fault(raw)
    assert sentence in str(error)
    assert not error.over


def test_a_uid_that_would_not_do_as_the_name_of_a_file_is_refused() -> None:
    for uid in ("../../etc/x", "", "a/b", "-a", "x" * 65):
        assert "its UID" in str(fault(resource_claim(uid=uid), PreparedName(ClaimUid(uid), "ml", "train")))


def test_a_uid_needs_no_dashes_as_those_of_static_pods_have_none() -> None:
    assert usable_uid(UID.replace("-", ""))
