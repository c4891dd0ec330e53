"""`helm install` of our chart where there is no Helm.

`python -m tests.support.helm_cli install NAME CHART OPTION...` prints what is to be applied, as one list.
$NRI_GPU_CHART_VALUES: JSON, values of the test's own that go over all others.
$NRI_GPU_API_PORT: of an API server on this machine, for a cluster without a proxy that leads pods to it.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tests.support.helm import Release, documents, merged, values

TALKS = "nri-gpu-dra"  # the DaemonSet whose pods ask the API server


def install(words: Sequence[str]) -> list[dict[str, Any]]:
    """What Helm would make of them. Raises: SystemExit: an option that this does not know."""
    parser = ArgumentParser()
    parser.add_argument("verb", choices=("install",))
    parser.add_argument("name")
    parser.add_argument("chart")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args(words)
    pairs = [pair.split("=", 1) for each in given.set for pair in each.split(",")]
    chosen: Mapping[str, Any] = {}
    for path, value in pairs:
        chosen = merged(chosen, _nested(path.split("."), yaml.safe_load(value)))
    own = json.loads(os.environ.get("NRI_GPU_CHART_VALUES", "{}"))
    made = documents(merged(values(**chosen), own), Release(given.name, given.namespace))
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": given.namespace}}
    return [namespace, *made] if given.create_namespace else made


def _nested(path: Sequence[str], value: object) -> dict[str, Any]:
    first, *rest = path
    return {first: _nested(rest, value) if rest else value}


def _reach(document: dict[str, Any], port: str) -> None:
    if (document["kind"], document["metadata"]["name"]) == ("DaemonSet", TALKS):
        spec = document["spec"]["template"]["spec"]
        spec["hostNetwork"] = True
        address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
        spec["containers"][0]["env"] += [{"name": name, "value": value} for name, value in address.items()]


def main() -> int:
    """Returns an exit code."""
    made = install(sys.argv[1:])
    if port := os.environ.get("NRI_GPU_API_PORT"):
        for each in made:
            _reach(each, port)
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": made}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
