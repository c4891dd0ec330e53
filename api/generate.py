"""Generates the Python modules of every .proto here: `python api/generate.py`, or `--check` to fail on drift.

Messages of all, and gRPC clients and servicers of those that are gRPC services (ttrpc has none). The modules are
checked in, so that installing needs no compiler. Needs the `codegen` extra, whose pin is exact:
another generator would write other bytes.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Unit:
    """One .proto and the folder its modules belong in; both relative to the repository's root. grpc: its services."""

    proto: Path
    out: Path = Path("nri_gpu/_pb")
    grpc: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """The file names that protoc makes of it."""
        stem = self.proto.stem
        return (f"{stem}_pb2.py", f"{stem}_pb2.pyi", *([f"{stem}_pb2_grpc.py"] if self.grpc else []))


UNITS: Final = (
    Unit(Path("api/nri.proto")),
    Unit(Path("api/ttrpc.proto")),
    Unit(Path("api/cri.proto"), grpc=True),
    Unit(Path("api/deviceplugin.proto"), grpc=True),
    Unit(Path("api/pluginregistration.proto"), grpc=True),
    Unit(Path("api/podresources.proto"), grpc=True),
    Unit(Path("api/dra.proto")),  # one servicer serves both versions of its service (dra/claim_service.py)
    Unit(Path("api/drahealth.proto")),
    Unit(Path("tests/support/cri_tests.proto"), Path("tests/support/_pb")),
)


def generate(unit: Unit, out: Path) -> None:
    """Runs protoc.

    Raises:
        CalledProcessError: it refused the file, and said why on stderr.

    """
    proto = ROOT / unit.proto
    # -I is the file's own folder: descriptors then carry the bare file name, wherever the repository lies.
    flags = [f"-I{proto.parent}", f"--python_out={out}", f"--pyi_out={out}"]
    if unit.grpc:
        flags.append(f"--grpc_python_out={out}")
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, proto.name], cwd=proto.parent, check=True)
    if unit.grpc:  # the plugin imports the messages as if they were a top-level module
        module = out / f"{proto.stem}_pb2_grpc.py"
        package = ".".join(unit.out.parts)
        module.write_text(
            re.sub(r"^import (\w+_pb2) as", rf"from {package} import \1 as", module.read_text(), flags=re.M)
        )


def drift(unit: Unit) -> Iterator[str]:
    """The difference between what is checked in and what would be generated, as lines of a unified diff."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-proto-") as folder:
        generate(unit, Path(folder))
        for name in unit.modules:
            path = ROOT / unit.out / name
            have = path.read_text().splitlines() if path.exists() else []
            want = (Path(folder) / name).read_text().splitlines()
            label = str(unit.out / name)
            yield from difflib.unified_diff(have, want, f"{label} (checked in)", f"{label} (generated)", lineterm="")


def main() -> int:
    """Writes the modules, or with --check only compares. Returns 0, or 1 on drift or without the generator."""
    parser = argparse.ArgumentParser(description="Generate the protobuf modules from api/*.proto.")
    parser.add_argument("--check", action="store_true", help="write nothing; print a diff and exit 1 on any drift")
    check = parser.parse_args().check
    if importlib.util.find_spec("grpc_tools") is None:
        print(
            "api: grpcio-tools has no wheel for this Python: generated modules not compared, use Python 3.13 or older"
        )
        return 0 if check else 1
    units = [unit for unit in UNITS if (ROOT / unit.proto).exists()]
    if not check:
        for unit in units:
            (ROOT / unit.out).mkdir(exist_ok=True)
            generate(unit, ROOT / unit.out)
        return 0
    lines = [line for unit in units for line in drift(unit)]
    for line in lines:
        print(line)
    if lines:
        print("generated modules differ from their .proto: run `make proto`", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
