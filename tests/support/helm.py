"""The chart as Helm itself takes it: rendered by Helm 4 out of a Python package, and by the programs of tests/ground.

Values are merged, held against the chart's schema and refused by Helm.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml
from msgspec import Struct

from tests import ground
from tests.support.errors import HarnessError

if TYPE_CHECKING:
    from helm_python import Chart

CHART: Final = Path(__file__).parents[2] / "deploy" / "helm" / "nri-gpu"
LACKING: Final = (
    ""
    if find_spec("helm_python")
    else "Helm's package, helm-python-sdk, is not installed: it has no wheel for this platform"
)
IMAGE: Final = "nri-gpu"  # there is no public one, so the chart has no default
PROGRAMS: Final = ("helm3", "helm4")  # sets of tests/ground
TEST: Final = (
    "test.yaml"  # the template of `helm test`, of which neither `helm install` nor `kubectl apply` makes anything
)


class RefusedError(Exception):
    """What Helm says of values that are not the schema's, or what a template's `fail` says of an installation."""


class Release(Struct, frozen=True):
    """What Helm knows of an installation."""

    name: str = "nri-gpu"
    namespace: str = "nri-gpu"


@cache
def _chart(folder: Path = CHART) -> Chart:
    if LACKING:
        pytest.skip(LACKING)
    from helm_python import Chart

    return Chart.load(folder)


def values(**changed: object) -> dict[str, Any]:
    """The chart's defaults and an image, with tables merged over them, as `-f` does."""
    return _chart().merge_values(_with_image(changed))


def _with_image(changed: dict[str, Any]) -> dict[str, Any]:
    return {**changed, "image": {"repository": IMAGE, **changed.get("image", {})}}


def render(release: Release | None = None, folder: Path = CHART, **changed: object) -> dict[str, str]:
    """Template's file name -> text, of every template that an installation makes something of. Raises: RefusedError."""
    texts = _texts(release, changed, folder)
    return {name: text for name, text in texts.items() if name != TEST}


def of_helm_test(release: Release | None = None, **changed: object) -> dict[str, Any]:
    """Kind -> object, of what `helm test` makes."""
    return {each["kind"]: each for each in parsed(_texts(release, changed)[TEST]) if each}


def _texts(release: Release | None, changed: dict[str, Any], folder: Path = CHART) -> dict[str, str]:
    chosen, chart = release or Release(), _chart(folder)
    from helm_python import HelmError

    try:
        texts = chart.render(_with_image(changed), name=chosen.name, namespace=chosen.namespace)
    except HelmError as fault:
        raise RefusedError(str(fault)) from fault
    return {
        name.rpartition("/")[2]: text for name, text in sorted(texts.items()) if name.endswith(".yaml") and text.strip()
    }


def documents(release: Release | None = None, folder: Path = CHART, **changed: object) -> list[dict[str, Any]]:
    """The same, parsed."""
    found = [each for text in render(release, folder, **changed).values() for each in parsed(text)]
    return [each for each in found if each]


def parsed(text: str) -> list[Any]:
    """By libyaml, where PyYAML has it: hundreds of documents are read in one run of the tests."""
    return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


class Helm:
    """The program, with folders of its own. kubeconfig: of a cluster; none by default, nor what the caller's names.

    enter: runs a command where that cluster's API server answers.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        kubeconfig: Path = Path(os.devnull),
        enter: Callable[..., subprocess.CompletedProcess[str]] | None = None,
    ) -> None:
        self.path = ground.need(name) / "helm"
        # A release has the version of Kubernetes linked in that its modules are of; `go install` leaves that out.
        self.kube_version = f"--kube-version={ground.version(name, 'k8s.io/client-go').replace('0.', '1.', 1)}"
        homes = {f"HELM_{each}_HOME": str(folder / each.lower()) for each in ("CACHE", "CONFIG", "DATA")}
        self._own = {**homes, "KUBECONFIG": str(kubeconfig)}
        self.environment = {**os.environ, **self._own}
        self._enter = enter

    def __call__(self, *words: str | Path) -> str:
        """Standard output. Raises: HarnessError: with what it says."""
        command = [str(each) for each in (self.path, *words)]
        if self._enter:
            done = self._enter("env", *(f"{name}={value}" for name, value in self._own.items()), *command)
        else:
            done = subprocess.run(
                command, capture_output=True, text=True, env=self.environment, timeout=300, check=False
            )
        if done.returncode:
            raise HarnessError(f"helm {' '.join(command[1:])[:200]}: {done.stderr[-2000:]}")
        return done.stdout
