"""The request grammar, and which annotation applies to a container: one named case per rule."""

from __future__ import annotations

import pytest

from nri_gpu.domain.errors import RequestError
from nri_gpu.domain.gpu_request import (
    Claim,
    Count,
)
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.request.annotation import VALUE_MAX, parse_claim, select_annotation
from tests.unit.request.samples import BAD, GOOD, KEY


@pytest.mark.parametrize("expected", GOOD.values(), ids=GOOD.keys())
def test_understood(expected: Claim) -> None:
    assert parse_claim(KEY, expected.text) == expected


@pytest.mark.parametrize(("value", "position", "sentence"), BAD.values(), ids=BAD.keys())
def test_refused_with_place_and_way_out(value: str, position: int, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_claim(KEY, value)
    assert sentence in str(caught.value)
    assert caught.value.position == position
    assert caught.value.key == KEY


def test_the_longest_value_is_still_read() -> None:
    assert parse_claim(KEY, " " * (VALUE_MAX - 1) + "1").wanted == Count(1)


def test_what_is_echoed_is_clipped_and_escaped() -> None:
    with pytest.raises(RequestError) as caught:
        parse_claim(KEY, "device=" + "\\" * 4000)
    assert str(caught.value).count("\\") < 50


def test_the_key_is_kept_whole_in_the_claim_and_clipped_in_an_error() -> None:
    key = "gpu.nri.io/container." + "n" * 500
    assert parse_claim(key, "1").key == key
    with pytest.raises(RequestError) as caught:
        parse_claim(key, "")
    assert len(str(caught.value)) < 300


BASE = "gpu.nri.io"
POD = "gpu.nri.io/pod"
MAIN = "gpu.nri.io/container.main"
RUNTIME_KEYS = {"io.kubernetes.cri.sandbox-name": "x", "kubernetes.io/config.seen": "y"}

CHOICES = {
    "nothing asked": ({}, None),
    "pod beats base": ({BASE: "1", POD: "2"}, (POD, "2")),
    "container beats pod and base": ({BASE: "1", POD: "2", MAIN: "none"}, (MAIN, "none")),
    "an empty value still wins": ({BASE: "1", MAIN: ""}, (MAIN, "")),
    "another container's key": ({"gpu.nri.io/container.other": "1"}, None),
    "a name that begins like ours": ({"gpu.nri.io/container.main2": "1"}, None),
    "a look-alike domain is not our space": ({"gpu.nri.io.evil/pod": "1", "my-gpu.nri.io/pod": "1"}, None),
    "our name inside another key": ({"x/gpu.nri.io": "1"}, None),
    "a value that mentions us": ({"note": "gpu.nri.io/pod"}, None),
}


@pytest.mark.parametrize(("pod", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_the_most_specific_key_wins_whole(pod: dict[str, str], expected: tuple[str, str] | None) -> None:
    assert select_annotation(pod, RUNTIME_KEYS, "main") == expected


UNKNOWN = {
    "mistyped container": ("gpu.nri.io/contaner.main", 'did you mean "gpu.nri.io/container.<name>"?'),
    "mistyped pod": ("gpu.nri.io/pods", 'did you mean "gpu.nri.io/pod"?'),
    "container without a dot": ("gpu.nri.io/container", "known: gpu.nri.io, gpu.nri.io/pod"),
    "container without a name": ("gpu.nri.io/container.", "the container's name is missing"),
    "nothing behind the slash": ("gpu.nri.io/", "unknown annotation"),
    "the grant on the pod": (GRANT_KEY, "unknown annotation"),
}


@pytest.mark.parametrize(("key", "sentence"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_key_in_our_space_that_means_nothing_is_an_error(key: str, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        select_annotation({key: "1", BASE: "1"}, {}, "main")
    assert sentence in str(caught.value)
    assert caught.value.position is None


ON_CONTAINER: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "our own annotation": ({}, {GRANT_KEY: "v1;mode=shared"}, "only nri-gpu writes this annotation"),
    "a request": ({}, {BASE: "1"}, "read from the annotations of the pod"),
}


@pytest.mark.parametrize(("pod", "own", "sentence"), ON_CONTAINER.values(), ids=ON_CONTAINER)
def test_annotations_of_the_container_itself_are_refused(
    pod: dict[str, str], own: dict[str, str], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        select_annotation(pod, own, "main")


def test_annotations_that_the_runtime_copied_from_the_pod_do_no_harm() -> None:
    pod = {BASE: "1", "gpu.nri.io/container.other": "2"}
    assert select_annotation(pod, dict(pod), "main") == (BASE, "1")


def test_a_hostile_key_is_shown_clipped_and_escaped() -> None:
    with pytest.raises(RequestError) as caught:
        select_annotation({"gpu.nri.io/" + "z\n\u20ac" * 50_000: ""}, {}, "main")
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
