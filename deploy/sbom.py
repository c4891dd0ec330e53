"""Writes the bill of materials of a release: dist/nri-gpu-VERSION.cdx.json, in CycloneDX's JSON; and the image's.

    python -m deploy.sbom [--output FOLDER]

It names each package that deploy/locks/runtime.txt pins: the hashes of its files from there, its licence and what it
needs from the installed package, which `make` installed from a lock with the same versions. The same lock and version
make the same file, as long as SOURCE_DATE_EPOCH is the same; by default it is the time of the last commit.
"""

from __future__ import annotations

import re
import sys
import tomllib
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.contrib.this.builders import this_component
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseAcknowledgement
from cyclonedx.output.json import JsonV1Dot6
from msgspec import Struct
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.bundle import LOCK, ROOT, BundleError, released_at, tell_of_folder
from nri_gpu import __version__

NAME: Final = "nri-gpu"
FILE: Final = f"{NAME}-{__version__}.cdx.json"
IMAGE_FILE: Final = f"{NAME}-{__version__}.oci.cdx.json"
DECLARED: Final = LicenseAcknowledgement.DECLARED
HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
# What packages call a licence -> its SPDX identifier, where no other is meant. An SPDX identifier stays as it is.
SPDX: Final = {"MIT License": "MIT", "3-Clause BSD License": "BSD-3-Clause"}


class Pin(Struct, frozen=True):
    """One package of the lock. hashes: SHA-256 of each of its files, in hexadecimal digits."""

    name: str
    version: str
    hashes: tuple[str, ...]


class SbomError(BundleError):
    """No bill of materials can be made. Says why."""


def pins(lock: str) -> tuple[Pin, ...]:
    """What a lock file pins, in its order. Raises: ValueError."""
    found = []
    for line in lock.replace("\\\n", " ").splitlines():
        text = line.partition(" --hash")[0].strip()
        if text and not text.startswith("#"):
            requirement = Requirement(text)
            [version] = requirement.specifier
            found.append(Pin(canonicalize_name(requirement.name), version.version, tuple(HASH.findall(line))))
    return tuple(found)


def debian(listed: str, suite: str, architecture: str) -> tuple[Component, ...]:
    """Return the packages of a Debian. listed: what `dpkg-query --show` prints. architecture: as Debian calls it."""
    found = []
    for line in listed.splitlines():
        name, _, version = line.partition("\t")
        name = name.partition(":")[0]
        facts = {"arch": architecture, "distro": suite}
        purl = PackageURL("deb", "debian", name, version, qualifiers=facts)
        reference = f"debian:{name}"
        found.append(Component(name=name, version=version, type=ComponentType.LIBRARY, bom_ref=reference, purl=purl))
    return tuple(found)


def bill(packages: Iterable[Pin], made: datetime, more: Sequence[Component] = ()) -> Bom:
    """Return the bill of materials. more: components beside the packages, which name none that they need.

    Raises: SbomError when another version is installed than the one that is pinned.
    """
    components = {pin.name: _component(pin) for pin in packages}
    ours = Component(
        name=NAME,
        version=__version__,
        type=ComponentType.APPLICATION,
        bom_ref=NAME,
        purl=PackageURL("pypi", version=__version__, name=NAME),
        licenses=[LicenseFactory().make_from_string("Apache-2.0", license_acknowledgement=DECLARED)],
    )
    beside = [f"{each.name} {each.version}" for each in more]
    known = f"{NAME} {__version__} {made.isoformat()} {sorted(components) + beside}"
    serial = uuid.uuid5(uuid.NAMESPACE_OID, known)
    bom = Bom(components=[*components.values(), *more], serial_number=serial, metadata=BomMetaData(timestamp=made))
    bom.metadata.component = ours
    bom.metadata.tools.components.add(this_component())
    bom.register_dependency(ours, [components[name] for name in _needed(NAME) if name in components])
    for name, component in components.items():
        bom.register_dependency(component, [components[each] for each in _needed(name) if each in components])
    return bom


def _component(pin: Pin) -> Component:
    try:
        installed = metadata.metadata(pin.name)
    except metadata.PackageNotFoundError:
        raise SbomError(f"{pin.name} {pin.version} is locked but not installed: run `make` first") from None
    if installed["Version"] != pin.version:
        raise SbomError(f"{pin.name} {pin.version} is locked, {installed['Version']} is installed: run `make` first")
    purl = PackageURL("pypi", name=pin.name, version=pin.version)
    # The Python and the processor decide which of them is installed, so they are no hash of the component.
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(purl.to_string()),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in pin.hashes],
    )
    return Component(
        name=pin.name,
        version=pin.version,
        type=ComponentType.LIBRARY,
        bom_ref=pin.name,
        purl=purl,
        description=next(iter(installed.get_all("Summary") or []), None),
        licenses=[LicenseFactory().make_from_string(_licence(installed), license_acknowledgement=DECLARED)],
        external_references=[files],
    )


def _licence(installed: metadata.PackageMetadata) -> str:
    classifiers = installed.get_all("Classifier") or []
    said: list[str] = [
        *(installed[name] for name in ("License-Expression",) if name in installed),
        *(each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")),
        *(installed[name] for name in ("License",) if name in installed),
    ]
    if not said:
        raise SbomError(f"{installed['Name']} {installed['Version']} does not say which licence it has")
    return SPDX.get(said[0], said[0])


def _needed(name: str) -> list[str]:
    """What a package asks for, without its extras, by normal name. Ours need not be installed."""
    project = ROOT / "pyproject.toml"
    ours = name == NAME
    asked = tomllib.loads(project.read_text())["project"]["dependencies"] if ours else metadata.requires(name)
    requirements = map(Requirement, asked or ())
    return sorted(
        {
            canonicalize_name(each.name)
            for each in requirements
            if each.marker is None or each.marker.evaluate({"extra": ""})
        }
    )


def write(output: Path, file: str = FILE, more: Sequence[Component] = ()) -> Path:
    """Returns the file. Raises: SbomError; bundle.BundleError: nobody says when it was made."""
    bom = bill(pins(LOCK.read_text()), datetime.fromtimestamp(released_at(), UTC), more)
    output.mkdir(parents=True, exist_ok=True)
    path = output / file
    path.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")
    return path


def main(arguments: Sequence[str]) -> int:
    """Write it and print where it is. Returns an exit code."""
    return tell_of_folder(arguments, "Write the bill of materials of a release.", lambda output: (write(output),))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
