"""The plain manifests, `deploy/manifests/nri-gpu.yaml`: what the chart renders with its default values.

python -m tests.support.manifests [--check]     --check: only tell whether they are up to date
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.support.helm import render, values

FILE: Final = Path(__file__).parents[2] / "deploy" / "manifests" / "nri-gpu.yaml"
HEAD: Final = """\
# Made from deploy/helm/nri-gpu with its default values, by `make manifests`; do not edit here.
# The image's name is nobody's registry: put yours in its place, as docs/kubernetes-install.md says.
apiVersion: v1
kind: Namespace
metadata:
  name: nri-gpu
  labels:
    # The daemon is privileged, and both have folders of the host.
    pod-security.kubernetes.io/enforce: privileged
"""


def manifests() -> str:
    """All of them, in the order to apply."""
    texts = render(values())
    order = ("serviceaccount.yaml", "configmap.yaml", "guard.yaml", "daemonset.yaml")
    assert set(order) == set(texts)
    return HEAD + "".join(f"---\n{_without_blank_ends(texts[name])}\n" for name in order)


def _without_blank_ends(text: str) -> str:
    """Blanks at the ends of lines say nothing in these documents, and editors remove them."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def main() -> int:
    """Write or check. Returns an exit code."""
    wanted = manifests()
    if "--check" not in sys.argv[1:]:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(wanted)
        return 0
    if FILE.is_file() and FILE.read_text() == wanted:
        return 0
    print(f"{FILE.name} is not what the chart renders: run `make manifests`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
