"""`make ground`: build the sets that are not there, in their order.

python -m tests.ground [--seconds N] [NAME...]     all sets where none is named; stop after N seconds
"""

from __future__ import annotations

import shutil
import sys
import time
from argparse import ArgumentParser

from tests.ground import SETS, build, built
from tests.support.errors import HarnessError


def main() -> int:
    """Return 0 where all sets are built, else 1 with a line for each that is not."""
    parser = ArgumentParser(prog="make ground", description=__doc__)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETS))
    given = parser.parse_args()
    if unknown := set(given.names) - set(SETS):
        parser.error(f"no set is called {', '.join(unknown)}: choose from {', '.join(SETS)}")
    if not shutil.which("go"):
        print("Go builds these programs, and is not on the search path: install Go 1.21 or newer")
        return 1
    begun, missing = time.monotonic(), 0
    for name in given.names or SETS:
        if built(name):
            continue
        began = time.monotonic()
        try:
            build(name, None if given.seconds is None else max(given.seconds - (began - begun), 0.0))
            print(f"{name}: built in {time.monotonic() - began:.0f} s", flush=True)
        except HarnessError as fault:
            missing += 1
            print(f"missing: {fault}", flush=True)
    for what, names in (("built", filter(built, SETS)), ("not built", (name for name in SETS if not built(name)))):
        print(f"sets of tests/ground that are {what}: {', '.join(names) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
