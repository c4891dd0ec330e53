"""`make dist`: the sdist is the checkout, the wheel has what is installed by hand, and runs alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

from nri_gpu import __version__

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


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def dist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two files, built from a copy as a fresh clone has it."""
    tree, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    uv = Path(sys.executable).with_name("uv")
    own = ("--no-build-isolation", "--python", sys.executable)
    subprocess.run([uv, "build", "--quiet", *own, "--out-dir", built], cwd=tree, check=True)
    return built


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
