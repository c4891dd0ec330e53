"""Extras of pods by the programs Helm 3 and Helm 4, and the chart's notes on update strategies, without a cluster."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import CROWDED
from tests.support.errors import HarnessError
from tests.support.helm import CHART, IMAGE, PROGRAMS, Helm, documents, parsed
from tools.manifests import as_options

OPTIONS = as_options({})
UNSERVED = "A node is unserved until the next one is ready"
STAYS = "With OnDelete, the old one stays until you delete its pod."
CLAIMS = "dra.updateStrategy ends a node's DRA driver before the next one starts"
MOUNT = "extraVolumeMounts[0]"
DRA = ("--set=kubelet.enabled=false,dra.enabled=true",)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ("updateStrategy={}", (), set()),
        ('updateStrategy={"rollingUpdate": {"maxSurge": 2}}', (), set()),
        ('updateStrategy={"rollingUpdate": {"maxUnavailable": "10%"}}', (), {UNSERVED}),
        ('updateStrategy={"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}', (), {UNSERVED}),
        ('updateStrategy={"type": "OnDelete"}', (), {UNSERVED, STAYS}),
        ('dra.updateStrategy={"type": "OnDelete"}', (), set()),
        ('dra.updateStrategy={"type": "OnDelete"}', DRA, {CLAIMS}),
        ('dra.updateStrategy={"type": "RollingUpdate"}', DRA, set()),
        ('observe.updateStrategy={"type": "OnDelete"}', ("--set=mode=observe",), set()),
    ],
)
def test_notes_say_when_a_node_is_unserved(
    tmp_path: Path, given: str, options: tuple[str, ...], said: set[str]
) -> None:
    told = ("--dry-run=client", f"--set-json={given}")
    made = Helm("helm4", tmp_path)("install", "nri-gpu", CHART, "--namespace=nri-gpu", *OPTIONS, *options, *told)
    notes = made.partition("NOTES:")[2]
    assert notes
    assert {each for each in (UNSERVED, STAYS, CLAIMS) if each in notes} == said


def template(helm: Helm, *options: str) -> str:
    """What an installation with these options makes."""
    return helm("template", "nri-gpu", CHART, "--skip-tests", "--namespace=nri-gpu", helm.kube_version, *options)


def by_name(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(made, key=lambda each: (each["kind"], each["metadata"]["name"]))


@pytest.mark.parametrize("program", PROGRAMS)
def test_both_programs_make_of_extras_what_the_package_does(tmp_path: Path, program: str) -> None:
    helm = Helm(program, tmp_path)
    for component, values in CROWDED.items():
        file = tmp_path / f"{component}.json"
        file.write_text(json.dumps({**values, "image": {"repository": IMAGE, **values["image"]}}))
        made = parsed(template(helm, f"--values={file}"))
        assert by_name(made) == by_name(documents(None, **values))


@pytest.mark.parametrize("program", PROGRAMS)
def test_both_programs_refuse_extras_with_a_sentence(tmp_path: Path, program: str) -> None:
    helm = Helm(program, tmp_path)
    for option, said in {
        "image.digest=latest": "/image/digest': 'latest' does not match pattern",
        "extraArgs={--log=DEBUG}": "extraArgs: --log=DEBUG repeats --log-level, which a value sets: remove it",
        "guard.extraEnv[0].name=NODE_NAME": "guard.extraEnv: NODE_NAME is the chart's own: remove it",
        f"extraVolumes[0].name=a,{MOUNT}.name=a,{MOUNT}.mountPath=/var": "/var covers /var/run/nri or a part of it",
        "updateStrategy.rollingUpdate.maxSurge=1,updateStrategy.rollingUpdate.maxUnavailable=1": "are both above 0",
        "updateStrategy.rollingUpdate.maxUnavailable=0": "are both 0",
        "extraObjects[0].kind=Secret": "extraObjects[0] lacks apiVersion or kind",
    }.items():
        with pytest.raises(HarnessError, match=re.escape(said)):
            template(helm, *OPTIONS, f"--set={option}")
