"""The program that writes what is checked in and generated, or only tells what is not as its source says.

python -m tools.generate [--check] [NAME ...]     without a NAME all but locks, goldens and pictures

The locks need a network. Goldens and pictures are compared by the tests that write them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from bench import record as performance
from tests.gpu import report as hardware
from tests.reliability import page as reliability
from tests.reliability import result
from tools import (
    chart_values,
    files,
    locks,
    manifests,
    messages,
    plots,
    policy,
    proto,
    reference,
    samples,
    schemas,
    share,
    site,
)
from tools.files import ROOT, Files, LackingError

COPIES: Final = ROOT / "deploy" / "helm" / "nri-gpu" / "files"


def records() -> Files:
    """Return pages with the tables of records in them."""
    made = {page: performance.rendered(page.read_text(), performance.read()) for page in performance.PAGES}
    made[reliability.PAGE] = reliability.rendered(reliability.PAGE.read_text(), result.read())
    made[hardware.PAGE] = hardware.rendered(hardware.PAGE.read_text())
    return made


def links() -> Files:
    """Return the list of links of pages to other sites."""
    return {site.LIST: site.links_text()}


def monitoring() -> Files:
    """Return the chart's copies of alerts and dashboard: a template reads no file outside its chart."""
    copies = {COPIES / each.name: each.read_text(encoding="utf-8") for each in (ROOT / "deploy/monitoring").iterdir()}
    return {**dict.fromkeys(COPIES.glob("*")), **copies}


MADE: Final[Mapping[str, Callable[[], Files]]] = {
    "proto": proto.modules,  # api/*.proto -> nri_gpu/_pb, tests/support/_pb
    "policy": policy.schema_and_page,  # nri_gpu/policy -> config/policy.schema.json, docs/reference/policy.md
    "schemas": schemas.documents,  # types of `-o json` -> api/schemas
    "share": share.completions_and_manuals,  # the table of verbs -> share
    "messages": messages.pages,  # nri_gpu/domain/phrases.py, deploy/monitoring/alerts.yaml -> docs/messages.md
    "reference": reference.pages,  # verbs -> docs/reference
    "monitoring": monitoring,  # deploy/monitoring -> the chart's folder
    "diagrams": reference.diagrams,  # docs/diagrams, health/states.py -> docs/pictures; drawn by graphviz
    "plots": plots.plots,  # docs/records -> docs/pictures
    "records": records,  # docs/records -> tables in pages
    "samples": samples.pages,  # what verbs print -> pages
    "links": links,  # pages -> docs/external-links.txt
    "values": chart_values.pages,  # the chart's values.yaml -> its README.md
    "manifests": manifests.manifests,  # the chart -> deploy/manifests
}
LOCKS: Final = "locks"  # newest versions of Python's packages -> deploy/locks
# Of these a difference is not all that can be wrong.
FAULTS: Final[Mapping[str, Callable[[], Iterable[str]]]] = {LOCKS: locks.faults, "messages": messages.unlike}
GOLDENS: Final = (
    "cli/test_goldens.py",
    "cli/test_status_command.py",
    "cli/test_terminal.py",
    "cdi/test_specification.py",
    "doctor",
    "injection/test_nri_golden.py",
)
# Modules with their options.
BY_TESTS: Final[Mapping[str, Sequence[Sequence[str]]]] = {
    "goldens": (("pytest", "-q", *(f"tests/unit/{name}" for name in GOLDENS)),),
    "pictures": (("tests.pictures",), ("pytest", "-q", "tests/conformance/test_demo.py", "-k", "recorded")),
}


def run_tests(name: str) -> bool:
    """Have tests write what they compare, and return whether they did."""
    environment = {**os.environ, "NRI_GPU_GOLDENS": "write"}
    commands = [[sys.executable, "-m", *words] for words in BY_TESTS[name]]
    return all(subprocess.run(each, cwd=ROOT, env=environment, check=False).returncode == 0 for each in commands)


def main() -> int:
    """Write or check, and return an exit code."""
    known = [*MADE, LOCKS, *BY_TESTS]
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*known, []], help=", ".join(known))
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something is stale")
    asked = parser.parse_args()
    names = asked.names or [*MADE, *([LOCKS] if asked.check else [])]
    if LOCKS in names and not asked.check:
        locks.write()
    found: list[str] = []
    for name in names:
        if name in BY_TESTS:
            found += [] if asked.check or run_tests(name) else [f"{name} are not written"]
            continue
        found += FAULTS.get(name, list)()
        if name == LOCKS:
            continue
        try:
            made = MADE[name]()
        except LackingError as lacking:
            print(f"{name}: neither made nor compared: {lacking}")
            found += [] if asked.check else [f"{name} is missing"]
            continue
        if asked.check:
            found += files.faults(made)
        else:
            files.write(made)
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
