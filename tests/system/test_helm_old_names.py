"""Old names of values that Helm keeps by itself: both programs do what the chart says of them, and that helps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.errors import HarnessError
from tests.support.helm import CHART, PROGRAMS, Helm
from tests.support.lone_api_server import LoneApiServer
from tests.support.released import BEFORE_CORDONS, PROJECT, unpacked

OLD = {
    "image": {"repository": "nri-gpu", "pullSecrets": [{"name": "old"}]},
    "maxSurge": 2,
    "metrics": {"enabled": True, "labels": {"release": "old"}},
    "stray": {"criDir": "/run/containerd"},
}
NEW = {
    "metrics.labels": "metrics.serviceMonitor.labels.release=new",
    "image.pullSecrets": "imagePullSecrets={new}",
    "maxSurge": "updateStrategy.type=OnDelete",
    "stray.criDir": "health.criDir=/run/containerd",
}
RELEASE = ("nri-gpu", "--namespace=gpus")


@pytest.fixture(scope="module")
def api_server() -> Iterator[LoneApiServer]:
    with LoneApiServer() as running:
        yield running


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_refusal_says_lets_an_upgrade_succeed(program: str, api_server: LoneApiServer, tmp_path: Path) -> None:
    helm = Helm(program, tmp_path, api_server.kubeconfig())
    (tmp_path / "old.json").write_text(json.dumps(OLD))
    old_chart = unpacked(BEFORE_CORDONS) / CHART.relative_to(PROJECT)
    helm("install", *RELEASE, old_chart, "--create-namespace", f"--values={tmp_path}/old.json")
    way, given = "--reuse-values", [f"--set={','.join(NEW.values())}"]
    for name in NEW:  # in the order in which they are met
        with pytest.raises(HarnessError, match=rf"{re.escape(name)} is the old name of ") as refused:
            helm("upgrade", *RELEASE, CHART, way, *given)
        (taken,) = re.findall(r"--set ([\w.]+=\w*)", str(refused.value))
        way = "--reset-then-reuse-values" if "--reset-then-reuse-values" in str(refused.value) else way
        given.append(f"--set={taken}")
    helm("upgrade", *RELEASE, CHART, way, *given)
    spec = json.loads(api_server.kubectl("get", "daemonset/nri-gpu", "--namespace=gpus", "--output=json"))["spec"]
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    assert spec["template"]["spec"]["imagePullSecrets"] == [{"name": "new"}]
    helm("uninstall", *RELEASE)
