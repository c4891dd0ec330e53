"""`make dist`: the sdist is the checkout, the wheel has what is installed by hand, and runs alone; Helm's archive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

from nri_gpu import __version__
from tests.support.helm import CHART, IMAGE, PROGRAMS, Helm

ROOT: Final = Path(__file__).parents[2]
# What setuptools adds to the checkout.
ADDED: Final = {"PKG-INFO", "setup.cfg"}
# From the tree to below `share/nri-gpu`. share/ itself is as it is in the tree.
SHARED: Final = {
    **{"config/policy.toml": "policy.toml", "config/policy.schema.json": "policy.schema.json"},
    **{"config/containerd": "containerd", "config/examples": "examples", "config/topologies": "topologies"},
    **{"deploy/helm": "helm", "deploy/manifests": "manifests", "deploy/monitoring": "monitoring"},
    "systemd": "systemd",
}
EPOCH: Final = 1_795_384_800


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def dist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three files, built from a copy as a fresh clone has it."""
    return build(tmp_path_factory.mktemp("first"), tracked)


def build(folder: Path, tracked: list[str], umask: int = 0o022) -> Path:
    """The files of a release, made in a folder below this one."""
    tree, built = folder / "tree", folder / "dist"
    for name in tracked:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)  # without its times
    command = [sys.executable, "-m", "deploy.dist", "--output", str(built)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}
    subprocess.run(command, cwd=tree, env=environment, umask=umask, check=True, capture_output=True)
    return built


def test_another_folder_and_another_umask_make_the_same_files(dist: Path, tracked: list[str], tmp_path: Path) -> None:
    again = build(tmp_path, tracked, 0o077)
    names = sorted(path.name for path in dist.iterdir())
    assert [Path(name).suffix for name in names] == [".tgz", ".whl", ".gz"]
    assert [name for name in names if (again / name).read_bytes() != (dist / name).read_bytes()] == []


@pytest.mark.parametrize("pattern", ["*.tar.gz", "*.tgz"])
def test_an_archive_says_neither_who_made_it_nor_when(dist: Path, pattern: str) -> None:
    [path] = dist.glob(pattern)
    with tarfile.open(path) as archive:
        facts = {(each.mtime, each.uid, each.gid, each.uname, each.gname) for each in archive}
    assert facts == {(EPOCH, 0, 0, "", "")}


@pytest.mark.parametrize("program", [pytest.param(name, marks=pytest.mark.ground(name)) for name in PROGRAMS])
def test_helm_finds_in_the_chart_archive_what_it_packs_itself(program: str, dist: Path, tmp_path: Path) -> None:
    helm, [archive] = Helm(program, tmp_path), dist.glob("*.tgz")
    helm("package", CHART, "--destination", tmp_path)
    with tarfile.open(archive) as ours, tarfile.open(tmp_path / archive.name) as theirs:
        assert set(ours.getnames()) == set(theirs.getnames())
    template = ("template", "nri-gpu", "--set", f"image.repository={IMAGE}", "--namespace=nri-gpu", helm.kube_version)
    assert helm(*template, archive) == helm(*template, CHART)


def test_the_sdist_is_the_checkout(dist: Path, tracked: list[str]) -> None:
    with tarfile.open(dist / f"nri_gpu-{__version__}.tar.gz") as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in names - ADDED if not name.startswith("nri_gpu.egg-info/")} == set(tracked)


def test_the_wheel_has_all_that_is_installed_by_hand(dist: Path, tracked: list[str]) -> None:
    wheel, prefix = f"nri_gpu-{__version__}", f"nri_gpu-{__version__}.data/data/share/"
    with zipfile.ZipFile(dist / f"{wheel}-py3-none-any.whl") as archive:
        names = set(archive.namelist())
    wanted = {f"{prefix}{name.removeprefix('share/')}" for name in tracked if name.startswith("share/")}
    for source, target in SHARED.items():
        found = [name for name in tracked if name == source or name.startswith(f"{source}/")]
        assert found
        wanted |= {f"{prefix}nri-gpu/{target}{name.removeprefix(source)}" for name in found}
    assert {name for name in names if name.startswith(prefix)} == wanted
    package = {name for name in tracked if name.startswith("nri_gpu/")}
    assert {name for name in names if name.startswith("nri_gpu/")} == package


def test_the_wheel_runs_without_the_checkout(dist: Path, tmp_path: Path) -> None:
    [wheel] = dist.glob("*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
        str(wheel),
    ]
    subprocess.run(pip, check=True, cwd=tmp_path)
    policy = tmp_path / "site" / "share" / "nri-gpu" / "policy.toml"
    for arguments, said in (["--version"], f"nri-gpu {__version__}"), (["check", str(policy)], str(policy)):
        command = [sys.executable, "-P", "-m", "nri_gpu", *arguments]
        found = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=found, check=False)
        assert (done.returncode, said in done.stdout) == (0, True), done
