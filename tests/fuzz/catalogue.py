"""All targets by name, and the module that has each: known without importing any, so that one can be instrumented."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

from tests.fuzz.target import Target

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "fuzz_wire": ("wire",),
    "fuzz_nri": ("nri-plugin", "nri-guard"),
    "fuzz_request": ("request",),
    "fuzz_requirements": ("requirements",),
    "fuzz_claim": ("claim",),
    "fuzz_note": ("note",),
    "fuzz_signed": ("signed",),
    "fuzz_state": ("state",),
    "fuzz_documents": ("policy", "topology", "manifest"),
    "fuzz_kernel": ("kernel",),
    "fuzz_peers": ("peers",),
}
NAMES: Final = tuple(name for names in MODULES.values() for name in names)


def load(name: str) -> Target:
    """Import its module, and with it what it tests."""
    module = next(module for module, names in MODULES.items() if name in names)
    target: Target = importlib.import_module(f"tests.fuzz.{module}").TARGETS[name]
    return target
