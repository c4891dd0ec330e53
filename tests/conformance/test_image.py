"""The checkout's own image, as `make image` builds it, in a real containerd."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from deploy import image, sbom
from nri_gpu import __version__
from tests.support.containerd import Containerd
from tests.support.marks import on_newest
from tests.support.own_image import build, own_image
from tests.support.pods import ContainerSpec
from tests.support.waiting import wait_for

READY_S = 30.0


def layer(archive: Path) -> bytes:
    with tarfile.open(archive) as whole:
        [name] = json.loads((whole.extractfile("manifest.json") or io.BytesIO()).read())[0]["Layers"]
        return (whole.extractfile(name) or io.BytesIO()).read()


def test_it_lists_its_debian_packages() -> None:
    archive = own_image()
    with tarfile.open(fileobj=io.BytesIO(layer(archive))) as files:
        listed = (files.extractfile(f"./{image.PACKAGE_LIST}") or io.BytesIO()).read().decode()
        status = (files.extractfile("./var/lib/dpkg/status") or io.BytesIO()).read().decode()
    packages = dict(line.split("\t") for line in listed.splitlines())
    assert len(packages) == status.count("\nStatus: install ok installed\n")
    assert packages["python3"].startswith(f"{image.PYTHON}.")
    bill = json.loads(archive.with_name(sbom.IMAGE_FILE).read_text())
    debian = {each["name"]: each["version"] for each in bill["components"] if each["purl"].startswith("pkg:deb/")}
    assert debian == {name.partition(":")[0]: version for name, version in packages.items()}


@pytest.mark.long
def test_two_builds_of_the_same_packages_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795384800")
    first, second = (
        {path.name: path.read_bytes() for path in build(tmp_path / name).parent.iterdir()} for name in "ab"
    )
    assert first.keys() == {image.FILE, sbom.IMAGE_FILE}
    assert [name for name in first if first[name] != second[name]] == []


@on_newest
def test_it_runs_with_a_read_only_root(node: Containerd, tmp_path: Path) -> None:
    """What it starts by itself, and beside that what the chart runs in it."""
    cri = node.cri
    node.ctr("images", "import", str(own_image()))
    wait_for("the image", lambda: cri.has_image(image.NAME), READY_S)
    folders = {"/run/nri-gpu": tmp_path / "state", "/var/lib/nri-gpu": tmp_path / "lib"}
    for folder in folders.values():
        folder.mkdir()
    mounts = {each: str(folder) for each, folder in folders.items()} | {"/var/run/nri": str(node.nri_socket.parent)}
    daemon = cri.run(cri.run_pod(), ContainerSpec(image=image.NAME, mounts=mounts, readonly_rootfs=True))
    wait_for("the daemon", lambda: cri.execute(daemon, "nri-gpu", "status", "--alive").code == 0, READY_S)
    assert cri.execute(daemon, "nri-gpu", "--version").stdout.split()[-1] == __version__
    assert cri.execute(daemon, "nri-gpu", "check").code == 0
    # Of the chart's init container.
    assert cri.execute(daemon, "sh", "-c", "mountpoint -q / && command -v mount mkdir").code == 0
