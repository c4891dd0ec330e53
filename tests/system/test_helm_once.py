"""What a release's NOTES say about things that a cluster has once."""

import pytest

from tests.support.helm import CHART, Helm
from tools.manifests import as_options

CLAIMS = "kubelet.enabled=false,dra.enabled=true"
SAID = {
    "defaults": ("admission.action=Warn", "It has the admission policy", "DeviceClasses"),
    "no admission policy": (
        "admission.enabled=false",
        "It has no admission policy (admission.enabled=false)",
        "It has the",
    ),
    "classes": (CLAIMS, "It has the DeviceClasses gpu.nri.io and mig.gpu.nri.io of the whole cluster", "It has no"),
    "no classes": (
        f"{CLAIMS},dra.deviceClasses=false,dra.driver=gpu.example.com",
        "Claims need gpu.example.com and mig.gpu.example.com of another release",
        "The classes stay",
    ),
    "an observer": ("mode=observe", "observes as release nri-gpu", "admission policy"),
}


@pytest.mark.parametrize("given", SAID)
def test_each_release_says_which_it_has(given: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    values, there, missing = SAID[given]
    helm = Helm("helm4", tmp_path_factory.mktemp("helm"))
    options = (*as_options({}), f"--set={values}", "--dry-run=client")
    notes = helm("install", "nri-gpu", CHART, "--namespace=nri-gpu", *options).partition("NOTES:")[2]
    assert there in notes
    assert missing not in notes
