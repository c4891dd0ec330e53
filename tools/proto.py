"""Python modules of every .proto.

Messages of all, and gRPC clients and servicers of those that are gRPC services (ttrpc has none). The modules are
checked in, so that installing needs no compiler. Needs the `codegen` extra, whose pin is exact:
another generator would write other bytes.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.files import ROOT, Files, LackingError


@dataclass(frozen=True, slots=True)
class Unit:
    """One .proto and the folder its modules belong in; both relative to the repository's root. grpc: its services."""

    proto: Path
    out: Path = Path("nri_gpu/_pb")
    grpc: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the file names that protoc makes of it."""
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
    Unit(Path("tests/support/deviceplugin_tests.proto"), Path("tests/support/_pb")),
)


def generate(unit: Unit, out: Path) -> None:
    """Run protoc.

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


def modules() -> Files:
    """Return all modules, by path."""
    if importlib.util.find_spec("grpc_tools") is None:
        raise LackingError("grpcio-tools has no wheel for this Python, use Python 3.13 or older")
    made: dict[Path, str] = {}
    with tempfile.TemporaryDirectory(prefix="nri-gpu-proto-") as folder:
        for unit in UNITS:
            generate(unit, Path(folder))
            made |= {ROOT / unit.out / name: (Path(folder) / name).read_text() for name in unit.modules}
    return made
