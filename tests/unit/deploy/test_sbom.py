"""The bill of materials, held against CycloneDX's schema and against the lock."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy import bundle, sbom
from nri_gpu import __version__
from tools.locks import locked


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sbom.write(tmp_path_factory.mktemp("dist"))


def test_cyclonedx_finds_it_valid(written: Path) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(written.read_text()) is None
    broken = written.read_text().replace('"library"', '"liberry"')
    assert validator.validate_str(broken) is not None


def test_it_names_what_the_lock_pins_with_all_hashes_and_a_licence(written: Path) -> None:
    bom = json.loads(written.read_text())
    ours = bom["metadata"]["component"]
    assert (written.name, ours["version"]) == (f"nri-gpu-{__version__}.cdx.json", __version__)
    assert {each["name"]: each["version"] for each in bom["components"]} == locked("runtime.txt")
    hashes = {
        item["content"]
        for each in bom["components"]
        for reference in each["externalReferences"]
        for item in reference["hashes"]
    }
    assert hashes == set(re.findall(r"sha256:([0-9a-f]{64})", bundle.LOCK.read_text()))
    assert all(each["licenses"] for each in [ours, *bom["components"]])


def test_it_says_which_package_needs_which(written: Path) -> None:
    needs = {each["ref"]: set(each.get("dependsOn", ())) for each in json.loads(written.read_text())["dependencies"]}
    assert {"msgspec", "rich", "grpcio", "pyyaml"} <= needs["nri-gpu"]
    assert needs["rich"] == {"markdown-it-py", "pygments"}
    assert needs["urllib3"] == set()
    # Nothing is in a release that nobody needs.
    assert set().union(*needs.values()) == needs.keys() - {"nri-gpu"}


def test_it_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795384800")
    first, second = (sbom.write(tmp_path / name).read_bytes() for name in ("a", "b"))
    assert first == second


def test_the_image_has_its_debian_packages_beside(tmp_path: Path) -> None:
    listed = "libstdc++6:amd64\t14.2.0-19\npython3\t3.13.5-1\n"
    path = sbom.write(tmp_path, sbom.IMAGE_FILE, sbom.debian(listed, "trixie", "amd64"))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text()) is None
    found = {each["purl"] for each in json.loads(path.read_text())["components"]}
    assert {each for each in found if each.startswith("pkg:deb/")} == {
        "pkg:deb/debian/libstdc%2B%2B6@14.2.0-19?arch=amd64&distro=trixie",
        "pkg:deb/debian/python3@3.13.5-1?arch=amd64&distro=trixie",
    }
    assert len(found) == 2 + len(locked("runtime.txt"))


def test_another_version_than_the_locked_one_is_refused() -> None:
    for pin in (sbom.Pin("rich", "0.1", ()), sbom.Pin("nri-gpu-absent", "1", ())):
        with pytest.raises(sbom.SbomError, match="locked"):
            sbom.bill([pin], datetime.now(UTC))
