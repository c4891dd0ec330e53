"""The image and the secrets to pull it, which every pod of the chart has alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.support.chart import CLAIMS
from tests.support.helm import CHART, RefusedError, documents, render

VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
POLICY = {"policy": "[limits]\n"}  # so that there is a Job
# Mode -> its values, and how many containers there are.
MODES: Mapping[str, tuple[dict[str, Any], int]] = {
    "kubelet": ({**POLICY, "mps": {"enabled": True}}, 4),
    "claims": ({**POLICY, **CLAIMS}, 4),
    "observe": ({"mode": "observe"}, 1),
}
every_mode = pytest.mark.parametrize("mode", MODES)


def pod_specs(at: object) -> Iterator[dict[str, Any]]:
    """Each pod's specification, wherever it lies in parsed YAML."""
    if isinstance(at, dict):
        if "containers" in at:
            yield at
        at = list(at.values())
    if isinstance(at, list):
        for below in at:
            yield from pod_specs(below)


def images(made: list[dict[str, Any]]) -> list[str]:
    return [
        container["image"]
        for spec in pod_specs(made)
        for container in (*spec["containers"], *spec.get("initContainers", ()))
    ]


@every_mode
@pytest.mark.parametrize(
    ("given", "image"),
    [
        ({}, f"nri-gpu:{VERSION}"),
        ({"image": {"tag": "1.2.3"}}, "nri-gpu:1.2.3"),
        ({"image": {"digest": DIGEST}}, f"nri-gpu@{DIGEST}"),
        ({"image": {"tag": "1.2.3", "digest": DIGEST}}, f"nri-gpu:1.2.3@{DIGEST}"),
        ({"image": {"registry": "registry.example.com:5000/a"}}, f"registry.example.com:5000/a/nri-gpu:{VERSION}"),
        ({"global": {"imageRegistry": "mirror.example.com"}}, f"mirror.example.com/nri-gpu:{VERSION}"),
        (
            {"global": {"imageRegistry": "mirror.example.com"}, "image": {"registry": "a.example.com"}},
            f"mirror.example.com/nri-gpu:{VERSION}",
        ),
    ],
)
def test_every_container_has_the_image_of_the_values(mode: str, given: dict[str, Any], image: str) -> None:
    values, count = MODES[mode]
    assert images(documents(**values, **given)) == [image] * count


@every_mode
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"imagePullSecrets": ["a", {"name": "b"}]}, ["a", "b"]),
        ({"global": {"imagePullSecrets": [{"name": "c"}, "d"]}}, ["c", "d"]),
        ({"global": {"imagePullSecrets": ["c", "a"]}, "imagePullSecrets": [{"name": "a"}, "b"]}, ["c", "a", "b"]),
        ({"imagePullSecrets": None, "global": {"imagePullSecrets": None}}, []),
    ],
)
def test_every_pod_has_the_secrets_of_the_values_once(mode: str, given: dict[str, Any], names: list[str]) -> None:
    specs = list(pod_specs(documents(**MODES[mode][0], **given)))
    assert specs
    for spec in specs:
        assert spec.get("imagePullSecrets", []) == [{"name": name} for name in names]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("digest", each) for each in (DIGEST[:-1], f"{DIGEST}0", DIGEST[7:], DIGEST.upper(), "latest", "md5:00")),
        *(("registry", each) for each in ("https://a.example.com", "a.example.com/", "/a", "a b", "a//b", "a:x")),
        ("repository", f"nri-gpu@{DIGEST}"),
        ("tag", f"1@{DIGEST}"),
    ],
)
def test_what_names_no_image_is_refused_by_its_value(key: str, value: str) -> None:
    with pytest.raises(RefusedError, match=f"/image/{key}': .*does not match pattern"):
        render(image={key: value})


def test_what_a_parent_sets_for_all_of_its_charts_changes_nothing_here() -> None:
    given: dict[str, Any] = {"enabled": False, "global": {"storageClass": "fast", "team": {"name": "a"}}}
    assert render(**given) == render()
