"""NOTES of the chart on update strategies by which a node is unserved for a while, by Helm 4 without a cluster."""

from pathlib import Path

import pytest

from tests.support.helm import CHART, Helm
from tools.manifests import as_options

OPTIONS = as_options({})
UNSERVED = "A node is unserved until the next one is ready"
STAYS = "With OnDelete, the old one stays until you delete its pod."
CLAIMS = "dra.updateStrategy ends a node's DRA driver before the next one starts"
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
