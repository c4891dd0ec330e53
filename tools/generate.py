"""Writes what is checked in and made of something else, or only tells what is not as its source says.

python -m tools.generate [--check] [NAME ...]     without a NAME all but `locks`, which needs a network
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Final

from bench import record as performance
from docs import build as site
from tests.gpu import report as hardware
from tests.reliability import page as reliability
from tests.reliability import result
from tools import files, locks, manifests, plots, policy, proto, reference, schemas, share
from tools.files import Files, LackingError


def records() -> Files:
    """Return pages with the tables of records in them."""
    made = {page: performance.rendered(page.read_text(), performance.read()) for page in performance.PAGES}
    made[reliability.PAGE] = reliability.rendered(reliability.PAGE.read_text(), result.read())
    made[hardware.PAGE] = hardware.rendered(hardware.PAGE.read_text())
    return made


def links() -> Files:
    """Return the list of links of pages to other sites."""
    return {site.LIST: site.links_text()}


MADE: Final[Mapping[str, Callable[[], Files]]] = {
    "proto": proto.modules,  # api/*.proto -> nri_gpu/_pb, tests/support/_pb
    "policy": policy.schema_and_page,  # nri_gpu/policy -> config/policy.schema.json, docs/reference/policy.md
    "schemas": schemas.documents,  # types of `-o json` -> api/schemas
    "share": share.completions_and_manuals,  # the table of verbs -> share
    "reference": reference.pages,  # verbs and clauses -> docs/reference
    "diagrams": reference.diagrams,  # docs/diagrams, health/states.py -> docs/pictures; drawn by graphviz
    "plots": plots.plots,  # docs/records -> docs/pictures
    "records": records,  # docs/records -> tables in pages
    "links": links,  # pages -> docs/external-links.txt
    "manifests": manifests.manifests,  # the chart -> deploy/manifests
}
LOCKS: Final = "locks"  # newest versions of Python's packages -> deploy/locks


def main() -> int:
    """Write or check. Returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*MADE, LOCKS, []], help=", ".join([*MADE, LOCKS]))
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something is stale")
    asked = parser.parse_args()
    names = asked.names or [*MADE, *([LOCKS] if asked.check else [])]
    found: list[str] = []
    for name in names:
        if name == LOCKS:
            if not asked.check:
                locks.write()
            found += locks.faults()
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
