"""`python -m bench.seeded_faults`: whether the tests catch each fault of seeded_faults.toml.

Each fault is one change of one line or two, in a copy of the working tree, which then runs the tests that the fault
names. A fault that no test catches is printed with `MISSED`; one whose text is not in the tree any more is an error.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from typing import Final

import pytest
from msgspec import Struct, convert

ROOT: Final = Path(__file__).parents[1]
LIST: Final = Path(__file__).with_suffix(".toml")
TIMEOUT_S: Final = 600
WORKERS: Final = 3  # more than processors: many a test waits
CAUGHT, MISSED, UNTRIED = "caught", "MISSED", "untried"  # untried: no unit or property test is named for it
PURE: Final = ("tests/unit/", "tests/property/")


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """What is changed where, and the tests (files or folders) that should catch it. why: what it would do to users."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    why: str


def faults(path: Path = LIST) -> tuple[Fault, ...]:
    """The list. Raises: msgspec.ValidationError."""
    return convert(tomllib.loads(path.read_text()), dict[str, tuple[Fault, ...]])["fault"]


def seeded(fault: Fault, text: str) -> str:
    """The file's text with the fault in it. Raises: ValueError: its text is not there exactly once."""
    if text.count(fault.before) != 1:
        raise ValueError(
            f"{fault.file} has the text of fault {fault.name!r} {text.count(fault.before)} times, not once"
        )
    return text.replace(fault.before, fault.after)


def caught(fault: Fault, tests: Sequence[str], tree: Path) -> bool:
    """Whether these tests fail with the fault in this copy of the tree, which is mended afterwards.

    Raises: ValueError: there are no such tests.
    """
    file = tree / fault.file
    good = file.read_text()
    file.write_text(seeded(fault, good))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "",
        # The first example that fails is enough: nobody reads a smaller one.
        "HYPOTHESIS_PROFILE": "fast",
        # Half of what a pytest costs that runs one file is its plugins, of which these tests need none.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
        if done.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise ValueError(f"fault {fault.name!r} names tests that are not there: {', '.join(tests)}")
        return b" failed" in done.stdout.splitlines()[-1]  # an error in the tests themselves is none of ours
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(good)


def copied(to: Path) -> Path:
    """A copy of the working tree, which keeps what is compiled from one fault to the next.

    The program's compiled code is compared with its source's hash: two faults of one size may come within a second.
    """
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for each in filter(None, files.split("\0")):
        (to / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / each, to / each)
    compileall.compile_dir(to / "nri_gpu", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return to


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.seeded_faults", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--pure", action="store_true", help="unit and property tests alone, as `make gates` has it")
    args = parser.parse_args()
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="nri-gpu-faults-") as name:
        trees = SimpleQueue[Path]()
        for number in range(WORKERS):
            trees.put(copied(Path(name) / str(number)))

        def seek(fault: Fault) -> tuple[Fault, str, float]:
            tests = [each for each in fault.tests if not args.pure or each.startswith(PURE)]
            began, tree = time.monotonic(), trees.get()
            try:
                if not tests:
                    return fault, UNTRIED, 0.0
                # Twice, since a property test draws other examples each time.
                found = caught(fault, tests, tree) or caught(fault, tests, tree)
                return fault, CAUGHT if found else MISSED, time.monotonic() - began
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(WORKERS) as pool:
            for fault, said, took_s in pool.map(seek, (each for each in faults() if args.only in each.name)):
                if said == MISSED:
                    missed.append(fault.name)
                print(f"{said:<7} {took_s:4.0f} s  {fault.name}", flush=True)
    for name in missed:
        print(f"{MISSED}: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
