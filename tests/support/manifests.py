"""The plain manifests below `deploy/manifests`: what Helm 4 renders, with the chart's defaults and in its other modes.

python -m tests.support.manifests [--check]     --check: only tell whether they are up to date
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.helm import IMAGE, LACKING, render

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "manifests"
# File -> what it is for, and the values that are not the chart's defaults.
SETS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "nri-gpu.yaml": ("the kubelet allocates GPUs", {}),
    "annotations.yaml": ("pods get GPUs by annotation alone", {"kubelet": {"enabled": False}}),
    "labels.yaml": (
        "the kubelet allocates GPUs, Node Feature Discovery labels nodes, the guard stops containers",
        {"labels": {"enabled": True}, "guard": {"criDir": "/run/containerd"}},
    ),
    "watcher.yaml": (
        "the kubelet allocates GPUs, and finds their device plugin by itself",
        {"kubelet": {"registration": "watcher"}},
    ),
    "dra.yaml": (
        "the scheduler allocates GPUs, by claims and as nvidia.com/gpu",
        {"kubelet": {"enabled": False}, "dra": {"enabled": True, "extendedResource": "nvidia.com/gpu"}},
    ),
}
HEAD: Final = """\
# {purpose}.
# Made from deploy/helm/nri-gpu with {values}, by `make manifests`; do not edit here.
# The image has no registry in its name: put yours in its place, as docs/kubernetes-install.md says.
apiVersion: v1
kind: Namespace
metadata:
  name: nri-gpu
  labels:
    # The daemon is privileged, and both mount folders of the host.
    pod-security.kubernetes.io/enforce: privileged
"""


def manifests(name: str) -> str:
    """All of one file, in the order to apply."""
    purpose, changed = SETS[name]
    texts = render(**changed)
    order = ("serviceaccount.yaml", "configmap.yaml", "admission.yaml", "guard.yaml", "daemonset.yaml", "dra.yaml")
    assert set(texts) <= set(order)
    head = HEAD.format(purpose=f"{purpose[0].upper()}{purpose[1:]}", values=" ".join(as_options(changed)))
    return head + "".join(f"---\n{_without_blank_ends(texts[each])}\n" for each in order if each in texts)


def as_options(changed: Mapping[str, Any]) -> list[str]:
    """Values as Helm's command line takes them."""
    given = {"image": {"repository": IMAGE}, **changed}
    pairs = [f"{table}.{key}={str(value).lower()}" for table, keys in given.items() for key, value in keys.items()]
    return ["--set", ",".join(pairs)]


def _without_blank_ends(text: str) -> str:
    """Blanks at the ends of lines say nothing in these documents, and editors remove them."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def main() -> int:
    """Write or check. Returns an exit code."""
    if LACKING:
        print(f"{FOLDER.name} is not rendered: {LACKING}")
        return 0 if "--check" in sys.argv[1:] else 1
    wanted = {FOLDER / name: manifests(name) for name in SETS}
    there = {path: path.read_text() for path in sorted(FOLDER.glob("*.yaml"))}
    if "--check" not in sys.argv[1:]:
        for path in there.keys() - wanted.keys():
            path.unlink()
        for path, text in wanted.items():
            path.write_text(text)
        return 0
    if there == wanted:
        return 0
    print(f"{FOLDER.name} is not what the chart renders: run `make manifests`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
