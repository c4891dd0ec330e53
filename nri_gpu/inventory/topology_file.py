"""Topology files: a node described in TOML, for demos, CI and clusters without GPUs. See config/topologies/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final

from msgspec import convert
from msgspec.structs import replace

from nri_gpu.domain.edits import Extra
from nri_gpu.domain.errors import Fault, InventoryError, PolicyError, cause_of
from nri_gpu.domain.finding import Finding, warning
from nri_gpu.domain.node import GpuFault, Inventory, Link, Majors, NumaNode
from nri_gpu.inventory.topology_reader import TableReader
from nri_gpu.inventory.topology_tables import FileTable
from nri_gpu.policy.lines import key_lines, line_of, read_toml
from nri_gpu.system.clocks import since_boot_s
from nri_gpu.system.storage import open_input

FILE_MAX: Final = 16 << 20  # bytes; 16 GPUs with all their links take 10 000
FORMER: Final = "change"  # the array of tables that is read and ignored for a release


class TopologyError(InventoryError):
    """A topology file's faults, all at once."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(str(fault) for fault in faults), faults=faults)


def load_topology(path: str | Path, *, boot_clock: Callable[[], float] = since_boot_s) -> Inventory:
    """Return the node of a topology file. Raises: TopologyError."""
    return parse_topology(_text(path), str(path), boot_clock())


def former_tables(path: str | Path) -> Iterator[Finding]:
    """Yield a finding if the file has `[[change]]`, which an earlier version played. Raises: TopologyError."""
    line = line_of(key_lines(_text(path)), f"{FORMER}[0]")
    if line:
        sentence = f"[[{FORMER}]], line {line} of {path}, is ignored: edit the file to change the node; remove it"
        yield warning("topology file", sentence, f"# take each [[{FORMER}]] out of {path}")


def _text(path: str | Path) -> str:
    try:
        with open_input(path) as file:
            content = file.read(FILE_MAX + 1)
        if len(content) > FILE_MAX:
            raise TopologyError(Fault(str(path), "", f"is larger than {FILE_MAX >> 20} MiB"))
        return content.decode()
    except OSError as error:
        denied = isinstance(error, PermissionError)
        raise TopologyError(Fault(str(path), "", cause_of(error), denied=denied)) from error
    except UnicodeDecodeError as error:
        raise TopologyError(Fault(str(path), "", f"is not UTF-8: {error.reason}")) from error


def parse_topology(text: str, file: str, taken_at: float) -> Inventory:
    """Return the node that `text` describes.

    Raises: TopologyError, with every wrong value, or, if there is none, with every GPU that is named and does not
    exist.
    """
    try:
        data = read_toml(text, file)
    except PolicyError as error:
        raise TopologyError(*error.faults) from None
    data.pop(FORMER, None)
    reader = TableReader(file)
    table = reader.read(FileTable, data)
    for path, message in _references(table) if table and not reader.faults else ():
        reader.fault(path, message)
    if reader.faults or not table:
        lines = key_lines(text)
        raise TopologyError(*(replace(fault, line=line_of(lines, fault.key)) for fault in reader.faults))
    return _inventory(table, taken_at)


def _references(file: FileTable) -> Iterator[tuple[str, str]]:
    """Yield key path and sentence of each link or event of a missing GPU, and of each repeated link."""
    known, pairs = {gpu.index for gpu in file.gpu}, dict[tuple[int, int], int]()
    named = [(f"link[{place}].{end}", getattr(link, end)) for place, link in enumerate(file.link) for end in "ab"]
    named += [(f"event[{place}].gpu", event.gpu) for place, event in enumerate(file.event)]
    yield from ((path, f"there is no GPU with index {index}") for path, index in named if index not in known)
    for place, link in enumerate(file.link):
        if (first := pairs.setdefault((link.a, link.b), place)) != place:
            yield f"link[{place}]", f"the same as link[{first}]"


def _inventory(file: FileTable, taken_at: float) -> Inventory:
    node = file.node
    faults = convert(file.fault, list[GpuFault], from_attributes=True)
    links = convert(file.link, list[Link], from_attributes=True)
    numa = convert(file.numa, list[NumaNode], from_attributes=True)
    return Inventory(
        taken_at=taken_at,
        gpus=tuple(sorted((table.gpu() for table in file.gpu), key=attrgetter("index"))),
        faults=tuple(sorted(faults, key=attrgetter("index"))),
        links=tuple(sorted(links, key=attrgetter("a", "b"))),
        numa=tuple(sorted(numa, key=attrgetter("number"))),
        majors=convert(node.majors, Majors, from_attributes=True),
        driver_version=node.driver,
        cuda_version=node.cuda,
        simulated=True,
        extras={Extra(table.name): table.extra() for table in node.extra},
        script=tuple(sorted((table.event() for table in file.event), key=attrgetter("at_s"))),
        modules=node.modules,
        nvswitches=node.nvswitches,
    )
