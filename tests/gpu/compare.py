"""Holds `nri-gpu gpus -o json` against `nvidia-smi -q -x`, field by field.

    python -m tests.gpu.compare [--driver-root DIR] [--smi FILE] [--ours FILE]

Both are asked on this machine unless a file has what one of them said elsewhere. Prints a line for each field, and ends
with 1 where one differs. What this nvidia-smi does not print at all (an older one) is no difference, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from msgspec import Struct

MIB: Final = 2**20
NO_CLUSTER: Final = "00000000-0000-0000-0000-000000000000"
# Of brands whose name nvidia-smi spells out; others differ in case and blanks alone.
BRANDS: Final = {
    "nvidiavirtualapplications": "vapps",
    "nvidiavirtualpc": "vpc",
    "nvidiavirtualcomputeserver": "vcs",
    "nvidiartxvirtualworkstation": "vws",
    "nvidiacloudgaming": "cloudgaming",
}


class Verdict(StrEnum):
    """Of one field."""

    SAME = "same"
    DIFFERS = "DIFFERS"
    NOT_TOLD = "not told by nvidia-smi"


class Row(Struct, frozen=True):
    """One field. what: `GPU 0 uuid`. ours, theirs: in the same words."""

    what: str
    ours: str
    theirs: str | None

    @property
    def verdict(self) -> Verdict:
        """What came of it."""
        if self.theirs is None:
            return Verdict.NOT_TOLD
        return Verdict.SAME if self.ours == self.theirs else Verdict.DIFFERS


class Field(Struct, frozen=True):
    """One thing that both tell of a GPU. tag: where it is in the XML. ours, theirs: to words that can be compared."""

    name: str
    tag: str
    ours: Callable[[Mapping[str, Any]], object]
    theirs: Callable[[str], str] = str.lower


def _bus_id(text: str) -> str:
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _brand(text: str) -> str:
    word = text.lower().replace(" ", "")
    return BRANDS.get(word, word)


def _on(value: bool | None) -> str | None:
    return None if value is None else "enabled" if value else "disabled"


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _ecc(when: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda gpu: _on(gpu["ecc"][when]) if gpu["ecc"] else None


def _fabric(key: str) -> Callable[[Mapping[str, Any]], object]:
    return lambda gpu: gpu["fabric"][key] if gpu["fabric"] else None


def _status(gpu: Mapping[str, Any]) -> str | None:
    return None if not gpu["fabric"] else "failure" if gpu["fabric"]["status"] else "success"


def _mib(words: str) -> str:
    return f"{words.removesuffix(' MiB')} MiB" if words.endswith(" MiB") else words


FIELDS: Final = (
    Field("minor", "minor_number", lambda gpu: gpu["minor_number"]),
    Field("uuid", "uuid", lambda gpu: gpu["uuid"], str),
    Field("bus id", "pci/pci_bus_id", lambda gpu: gpu["pci_bus_id"], _bus_id),
    Field("product name", "product_name", lambda gpu: gpu["model"], str),
    Field("brand", "product_brand", lambda gpu: gpu["brand"], _brand),
    Field(
        "architecture",
        "product_architecture",
        lambda gpu: gpu["architecture"],
        lambda text: text.lower().replace(" ", "-"),
    ),
    Field("memory", "fb_memory_usage/total", lambda gpu: f"{gpu['memory_bytes'] // MIB} MiB", _mib),
    Field("MIG mode", "mig_mode/current_mig", lambda gpu: _on(gpu["mig_enabled"])),
    Field(
        "compute mode",
        "compute_mode",
        lambda gpu: gpu["compute_mode"],
        lambda text: text.lower().replace("_", "-"),
    ),
    Field("persistence", "persistence_mode", lambda gpu: _on(gpu["persistence"])),
    Field("ECC", "ecc_mode/current_ecc", _ecc("current")),
    Field("ECC pending", "ecc_mode/pending_ecc", _ecc("pending")),
    Field("addressing", "addressing_mode", lambda gpu: gpu["addressing"]),
    Field(
        "recovery action",
        "gpu_recovery_action",
        lambda gpu: gpu["recovery_action"],
        lambda text: text.lower().replace(" ", "-"),
    ),
    Field("remap pending", "remapped_rows/remapped_row_pending", lambda gpu: _yes(gpu["remap_pending"])),
    Field("fabric state", "fabric/state", _fabric("state"), lambda text: text.lower().replace(" ", "-")),
    Field(
        "fabric status",
        "fabric/status",
        _status,
        lambda text: text.lower() if text in ("Success", "N/A") else "failure",
    ),
    Field("fabric clique", "fabric/cliqueId", _fabric("clique")),
    Field("fabric cluster", "fabric/clusterUuid", _fabric("cluster")),
)
MIG_FIELDS: Final = (
    Field("GPU instance", "gpu_instance_id", lambda part: part["gpu_instance_id"]),
    Field("compute instance", "compute_instance_id", lambda part: part["compute_instance_id"]),
    Field("uuid", "uuid", lambda part: part["uuid"], str),  # not every nvidia-smi has it here
    Field("memory", "fb_memory_usage/total", lambda part: f"{part['memory_bytes'] // MIB} MiB", _mib),
)
# What we may have where nvidia-smi tells nothing: a GPU without MIG is not in MIG mode either, and one that has not
# joined its fabric is in no clique.
_ALIKE: Final[Mapping[str, frozenset[object]]] = {
    "MIG mode": frozenset({"disabled"}),
    "fabric clique": frozenset({0}),
    "fabric cluster": frozenset({NO_CLUSTER}),
}


def compare(ours: Mapping[str, Any], smi: str) -> list[Row]:
    """ours: the document of `nri-gpu gpus -o json`. smi: that of `nvidia-smi -q -x`."""
    root = ElementTree.fromstring(smi)
    theirs = root.findall("gpu")
    rows = [
        Row("driver version", ours["driver_version"], _text(root, "driver_version")),
        Row("CUDA version", ours["cuda_version"], _text(root, "cuda_version")),
        Row("number of GPUs", str(len(ours["gpus"]) + len(ours["faults"])), _text(root, "attached_gpus")),
    ]
    by_index = {gpu["index"]: gpu for gpu in ours["gpus"]}
    for index, gpu in enumerate(theirs):
        if index in by_index:
            rows += _gpu(f"GPU {index}", by_index.pop(index), gpu)
        else:
            rows.append(Row(f"GPU {index}", "missing", _text(gpu, "uuid") or "there"))
    return [*rows, *(Row(f"GPU {index}", gpu["uuid"], "missing") for index, gpu in by_index.items())]


def _gpu(what: str, ours: Mapping[str, Any], theirs: ElementTree.Element) -> Iterator[Row]:
    for field in FIELDS:
        yield _row(what, field, ours, theirs)
    parts = {part["index"]: part for part in ours["mig"]}
    for device in theirs.findall("mig_devices/mig_device"):
        index = int(device.findtext("index", "-1"))
        if index in parts:
            for field in MIG_FIELDS:
                yield _row(f"{what} MIG {index}", field, parts[index], device)
            del parts[index]
        else:
            yield Row(f"{what} MIG {index}", "missing", "there")
    for index, part in parts.items():
        yield Row(f"{what} MIG {index}", part["uuid"], "missing")


def _row(what: str, field: Field, ours: Mapping[str, Any], theirs: ElementTree.Element) -> Row:
    text, found = _text(theirs, field.tag), field.ours(ours)
    if text == "N/A":
        nothing = found in (None, "") or found in _ALIKE.get(field.name, ())
        return Row(f"{what} {field.name}", "N/A" if nothing else str(found), "N/A")
    said = "N/A" if found in (None, "") else str(found)
    return Row(f"{what} {field.name}", said, None if text is None else field.theirs(text))


def _text(element: ElementTree.Element, tag: str) -> str | None:
    """What it says; None where it says nothing, or no more (`Requested functionality has been deprecated`)."""
    text = element.findtext(tag)
    return None if text is None or "deprecated" in text else text.strip()


def shown(rows: Sequence[Row]) -> str:
    """A table; what both have is shown once."""
    heads = ("FIELD", "NRI-GPU", "NVIDIA-SMI", "")
    lines = [heads, *((row.what, row.ours, row.theirs or "-", row.verdict.value) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join((*(cell.ljust(width) for cell, width in zip(line[:3], widths, strict=True)), line[3])).rstrip()
        for line in lines
    )


def differences(rows: Sequence[Row]) -> list[Row]:
    """Those that differ."""
    return [row for row in rows if row.verdict is Verdict.DIFFERS]


def ask_smi(driver_root: Path) -> str:
    """What nvidia-smi says, the driver's own where it is below the driver root. Raises: OSError, CalledProcessError."""
    places = [driver_root / folder / "nvidia-smi" for folder in ("bin", "usr/bin")]
    program = next((str(place) for place in places if place.exists()), "nvidia-smi")
    libraries = ":".join(str(driver_root / folder) for folder in ("lib64", "lib"))
    environment = os.environ | ({"LD_LIBRARY_PATH": libraries} if driver_root != Path("/") else {})
    return subprocess.run([program, "-q", "-x"], capture_output=True, text=True, check=True, env=environment).stdout


def ask_ours(driver_root: Path) -> dict[str, Any]:
    """What we say. Raises: ValueError: nothing, and why is on stderr."""
    command = [sys.executable, "-m", "nri_gpu", "gpus", "-o", "json", "--driver-root", str(driver_root)]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.compare")
    parser.add_argument("--driver-root", type=Path, default=Path("/"))
    parser.add_argument("--smi", type=Path, help="what `nvidia-smi -q -x` said")
    parser.add_argument("--ours", type=Path, help="what `nri-gpu gpus -o json` said")
    options = parser.parse_args(arguments)
    ours = json.loads(options.ours.read_text()) if options.ours else ask_ours(options.driver_root)
    smi = options.smi.read_text() if options.smi else ask_smi(options.driver_root)
    rows = compare(ours, smi)
    print(shown(rows))
    wrong = differences(rows)
    told = sum(row.verdict is not Verdict.NOT_TOLD for row in rows)
    print(f"{told} fields compared, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
