"""`nri-gpu driver`: the files of the NVIDIA driver, and the CUDA compatibility packages, that containers can get."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.cli.ask_daemon import daemon_status
from nri_gpu.cli.follow_daemon import followed_policy
from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.render import answer, titled
from nri_gpu.decision.cuda_choice import unfit_driver
from nri_gpu.domain.errors import CommandError, DriverError, Exit
from nri_gpu.domain.gpu import Capability, closure
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.driver.compat_packages import FoundCompat, FoundPackages, scan_compat
from nri_gpu.driver.driver_scan import FoundDriver, scan
from nri_gpu.driver.host_files import LeftOut
from nri_gpu.driver.search import OtherDriver
from nri_gpu.host.modules import module_version
from nri_gpu.system.node_name import NamedNode, this_node

COMPAT_32: Final = frozenset({Capability.COMPAT32})


class FileLine(Struct, frozen=True):
    """A file. kind: `library`, `program` or `file`. name: in a container's folder. source: below the driver root.

    links: names of the symlinks to it. places: where else in the container it is.
    """

    kind: str
    name: str
    source: str
    size_bytes: int
    links: tuple[str, ...]
    places: tuple[str, ...]


class CapabilityFiles(Struct, frozen=True):
    """The files of one capability in a container. missing: libraries that current drivers have and this one lacks.

    lacks: those without which the capability is refused, each clause a choice; empty where it is granted.
    """

    files: tuple[FileLine, ...]
    missing: tuple[str, ...]
    lacks: tuple[str, ...] = ()


class PackageLine(Struct, frozen=True):
    """A CUDA compatibility package. drivers: major versions that it is made for; null: any older one.

    not_with_this_driver: why it cannot be used here; empty if it can. files: names.
    """

    cuda: str
    version: str
    generation: str
    drivers: tuple[int, ...] | None
    not_with_this_driver: str
    files: tuple[str, ...]


class PackagesLine(Struct, frozen=True):
    """The CUDA compatibility packages of the host. left_out: what cannot be used of them."""

    packages: tuple[PackageLine, ...]
    left_out: tuple[LeftOut, ...]


class DriverDocument(Struct, frozen=True, kw_only=True, tag_field="schema", tag="nri-gpu/driver/v1"):
    """The driver's files for containers. capabilities: by name. left_out: files that were found and are not usable.

    generation: changes whenever a file does. unknown: files of no known capability, which no container gets. others:
    drivers of other versions below the root, which are not used.
    """

    node: NamedNode
    root: str
    version: str
    generation: str
    capabilities: Mapping[str, CapabilityFiles]
    left_out: tuple[LeftOut, ...]
    unknown: tuple[str, ...]
    compat: PackagesLine
    others: tuple[OtherDriver, ...]


def run(args: argparse.Namespace) -> int:
    """Print what is found. Return 1 if files had to be left out, 69 without a driver."""
    status = daemon_status(Path(args.state_dir or DEFAULT_STATE))
    policy = followed_policy(args, status)
    try:
        found = scan(Path(policy.driver.root), library_dirs=policy.driver.library_dirs, module=module_version())
        packages = scan_compat(Path(policy.compat.dir)) if policy.compat.dir else FoundPackages()
    except DriverError as error:
        raise CommandError(Exit.UNAVAILABLE, error) from None
    document = driver_document(found, packages)
    answer(args, document, _lines(document, simulated=status is not None and status.node.simulated))
    return Exit.FINDING if found.left_out or packages.left_out else Exit.OK


def driver_document(found: FoundDriver, packages: FoundPackages) -> DriverDocument:
    return DriverDocument(
        node=this_node(),
        root=str(found.root),
        version=found.version,
        generation=found.generation,
        capabilities={
            each.value: CapabilityFiles(
                tuple(_files(found, each)),
                tuple(found.missing[each]),
                tuple(libraries for needed, libraries in found.lacks.items() if needed in closure(frozenset({each}))),
            )
            for each in Capability
        },
        left_out=found.left_out,
        unknown=tuple(found.unknown),
        compat=PackagesLine(tuple(_package_line(each, found.version) for each in packages.packages), packages.left_out),
        others=found.others,
    )


def _files(found: FoundDriver, capability: Capability) -> Iterator[FileLine]:
    """Yield the files of one capability; a 32-bit library is of compat32 alone."""
    kinds = ("library", found.libraries), ("program", found.binaries), ("file", found.singles)
    for kind, files in (*kinds, ("library", found.libraries_32)):
        for file in files:
            if capability in (file.capabilities & COMPAT_32 or file.capabilities):
                links = tuple(name for name, _ in file.links)
                yield FileLine(kind, file.name, file.source.relative, file.source.size_bytes, links, file.places)


def _package_line(found: FoundCompat, driver_version: str) -> PackageLine:
    return PackageLine(
        cuda="{}.{}".format(*found.cuda),
        version=found.version,
        generation=found.generation,
        drivers=None if found.drivers is None else tuple(sorted(found.drivers)),
        not_with_this_driver=unfit_driver(found.version, found.drivers, driver_version),
        files=tuple(sorted(found.files)),
    )


def _lines(document: DriverDocument, *, simulated: bool) -> Iterator[Line]:
    """Yield a paragraph for each capability, the files that no container gets and why, and compatibility packages."""
    headline = f"driver {document.version} below {document.root}, generation {document.generation}"
    yield Line(titled(headline, simulated=simulated), Tone.HEAD)
    for capability, given in document.capabilities.items():
        yield from (Line(""), Line(capability, Tone.HEAD))
        yield from map(_file_line, given.files)
        if given.lacks:
            yield Line(f"  REFUSED  without {' and '.join(given.lacks)}", Tone.WARN)
        if given.missing:
            yield Line(f"  missing  {', '.join(given.missing)}", Tone.WARN)
    above = "the loaded kernel module, or the order of folders, chose the one above"
    yield from _paragraph("left out, no container gets them", map(_left_out, document.left_out), Tone.BAD)
    yield from _paragraph("of no known capability, no container gets them", document.unknown)
    yield from _paragraph(f"other drivers, not used: {above}", map(str, document.others))
    yield from _paragraph("CUDA compatibility packages", map(_package, document.compat.packages))
    yield from _paragraph("CUDA compatibility packages left out", map(_left_out, document.compat.left_out))


def _paragraph(head: str, entries: Iterable[str], tone: Tone = Tone.HEAD) -> Iterator[Line]:
    """Yield a blank line, the heading in its tone, and the entries below it, or nothing without entries."""
    if below := [Line(f"  {each}") for each in entries]:
        yield from (Line(""), Line(head, tone), *below)


def _file_line(file: FileLine) -> Line:
    names = ", ".join(file.places or file.links)
    return Line(f"  {file.kind:<8} {file.source}{' as ' if names else ''}{names}")


def _package(each: PackageLine) -> str:
    made_for = f"for drivers {', '.join(map(str, each.drivers))}" if each.drivers else "for older drivers"
    unfit = f"; NOT on this one: {each.not_with_this_driver}" if each.not_with_this_driver else ""
    return f"CUDA {each.cuda:<6} libcuda {each.version}, {made_for}{unfit}"


def _left_out(each: LeftOut) -> str:
    return f"{each.path}: {each.reason}"
