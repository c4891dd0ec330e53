"""The RPMs: built by rpmbuild, read by rpmlint, installed by rpm below a folder, and their scriptlets run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from deploy import bundle
from deploy.bundle import COMMON, DAEMON, OBSERVER
from deploy.rpm import build
from nri_gpu import __version__
from tests.support import packages

VERSION: Final = f"{__version__}-{bundle.REVISION}"
LINT: Final = build.SPEC.with_name("rpmlint.toml")
BUNDLE: Final = f"/{bundle.BUNDLE}"


# As the package was when it had all in it: the program and the policy stand for the rest.
OLDER: Final = """
Name: nri-gpu
Version: 0.1.0
Release: 1
Summary: All in one
License: Apache-2.0
%description
%install
mkdir -p %{buildroot}/usr/bin %{buildroot}/etc/nri-gpu
touch %{buildroot}/usr/bin/nri-gpu %{buildroot}/etc/nri-gpu/policy.toml
%files
/usr/bin/nri-gpu
%config(noreplace) /etc/nri-gpu/policy.toml
"""


def said(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_specification_has_the_version() -> None:
    text = build.SPEC.read_text()
    assert re.findall(r"^Version: +(.+)$", text, re.MULTILINE) == [__version__]
    assert re.findall(r"^Release: +(.+)$", text, re.MULTILINE) == [str(bundle.REVISION)]
    assert re.findall(r"^\*.* - (.+)$", text.partition("%changelog")[2], re.MULTILINE)[0] == VERSION


def test_it_is_content_with_each_python_that_has_wheels() -> None:
    wanted = {f"/usr/bin/python{version}" for version in bundle.PYTHONS}
    [required] = re.findall(r"^Requires: +\((/usr/bin/python.+)\)$", build.SPEC.read_text(), re.MULTILINE)
    assert set(required.split(" or ")) == wanted
    for name in ("pre common", "post common"):
        assert wanted <= set(re.findall(r"/usr/bin/python[\d.]+\d", scriptlet(name)))


def scriptlet(name: str, root: Path | None = None) -> str:
    """Of the specification. root: where its paths are to be taken."""
    found = re.search(rf"^%{name}\n(.*?)(?=^%[a-z]+\b)", build.SPEC.read_text(), re.MULTILINE | re.DOTALL)
    assert found, name
    text = found[1].replace("%{bundle}", BUNDLE)
    return re.sub(r"(?<![\w.}])/(usr|run|var)/", rf"{root}/\1/", text) if root else text


@pytest.mark.parametrize(
    "name",
    [
        *("pre common", "post common", "preun common"),
        *(f"{name}{of}" for name in ("post", "preun", "postun", "posttrans") for of in ("", " observe")),
    ],
)
def test_a_scriptlet_is_shell(name: str) -> None:
    subprocess.run(["sh", "-n"], input=scriptlet(name), text=True, check=True)


def test_without_a_python_it_says_so_and_changes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", scriptlet("pre common", tmp_path), "pre", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "nri-gpu needs Python 3.11 to 3.14; nothing was changed: dnf install python3.12\n"
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3.12").symlink_to(sys.executable)
    subprocess.run(["sh", "-c", scriptlet("pre common", tmp_path), "pre", "1"], check=True)


def test_enterprise_linux_9_runs_it_on_the_python_beside_its_own(tmp_path: Path) -> None:
    for version in bundle.PYTHONS:
        (tmp_path / bundle.BUNDLE / "lib" / f"python{version}").mkdir(parents=True)
    (tmp_path / bundle.BUNDLE / "bin").mkdir()
    programs = tmp_path / "usr/bin"
    programs.mkdir()
    for name in ("python3.9", "python3.11", "python3.12"):
        (programs / name).write_text("")
        (programs / name).chmod(0o755)
    (programs / "python3").symlink_to("python3.9")
    link = tmp_path / bundle.BUNDLE / "bin/python3"

    subprocess.run(["sh", "-c", scriptlet("post common", tmp_path), "post", "1"], check=True)
    assert link.readlink() == programs / "python3.12"

    (programs / "python3").unlink()
    (programs / "python3").symlink_to("python3.11")
    subprocess.run(["sh", "-c", scriptlet("post common", tmp_path), "post", "2"], check=True)
    assert link.readlink() == programs / "python3.11"


def test_it_is_built_found_good_installed_updated_and_removed(laid_out: Path, tmp_path: Path) -> None:
    """One test, because the package takes long to make, and each worker would make its own."""
    root = tmp_path / "root"
    built = build.pack(laid_out, tmp_path, "w0.ufdio", packages.command("rpmbuild", "rpm"))
    daemon, common, observer = built
    machine = os.uname().machine
    assert [path.name for path in built] == [f"{name}-{VERSION}.{machine}.rpm" for name in (DAEMON, COMMON, OBSERVER)]
    linted = said(*packages.command("rpmlint", "rpmlint", "rpm"), "--config", LINT, build.SPEC, *built)
    assert "0 errors, 0 warnings" in linted, linted

    _replaces_the_older(tmp_path, common, daemon)
    rpm = rpm_in(root)
    said(*rpm, "--install", common, observer)
    units = root / "usr/lib/systemd/system"
    assert [path.name for path in units.iterdir()] == ["nri-gpu-observe.service"]
    assert not (root / "etc/nri-gpu").exists()
    said(*rpm, "--install", daemon)
    link = root / bundle.BUNDLE / "bin/python3"
    assert not link.is_symlink()
    link.symlink_to("/usr/bin/python3")
    program = (link, "-I", root / bundle.BUNDLE / "nri-gpu")
    policy = root / "etc/nri-gpu/policy.toml"
    assert said(*program, "--version") == f"nri-gpu {__version__}\n"
    assert said(*program, "check", policy).startswith(f"{policy}: ok\n")
    assert said(root / "usr/bin/kubectl-nri_gpu", "--help").startswith("usage: kubectl nri-gpu ")
    assert said(*rpm, "--verify", *bundle.PACKAGES) == ""
    assert "ExecStart=/usr/bin/nri-gpu run" in (units / "nri-gpu.service").read_text()

    edited = policy.read_text() + "# mine\n"
    policy.write_text(edited)
    said(*rpm, "--upgrade", "--force", *built)
    assert policy.read_text() == edited
    assert list((root / bundle.BUNDLE).rglob("__pycache__"))
    said("sh", "-c", scriptlet("preun common", root), "preun", "0")
    said(*rpm, "--erase", *bundle.PACKAGES)
    memories = [root / "var/lib/nri-gpu/policy.in-force", root / "run/nri-gpu/policy.last"]
    for arguments, stay in (("1", True), ("0", False)):  # an update, the end
        for each in memories:
            each.parent.mkdir(parents=True, exist_ok=True)
            each.touch()
        said("sh", "-c", scriptlet("postun", root), "postun", arguments)
        assert [each.exists() for each in memories] == [stay, stay]
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.name == "bundle" or not path.is_dir()}
    assert {path for path in left if not path.startswith("var/lib/rpm/")} == {"etc/nri-gpu/policy.toml.rpmsave"}


def rpm_in(root: Path) -> list[str | Path]:
    return [*packages.command("rpm"), "--root", root, "--dbpath", "/var/lib/rpm", "--nodeps", "--noscripts"]


def _replaces_the_older(folder: Path, common: Path, daemon: Path) -> None:
    spec = folder / "older.spec"
    spec.write_text(OLDER)
    said(*packages.command("rpmbuild", "rpm"), "-bb", "--quiet", f"--define=_topdir {folder}/older", spec)
    [older] = folder.glob("older/RPMS/*/*.rpm")
    rpm = rpm_in(folder / "was")
    said(*rpm, "--install", older)
    with pytest.raises(AssertionError, match=r"/usr/bin/nri-gpu .*conflicts with file from package nri-gpu-0.1.0-1"):
        said(*rpm, "--install", common)
    said(*rpm, "--upgrade", common, daemon)
    assert said(*rpm[:-2], "--query", "--file", "/usr/bin/nri-gpu") == f"{common.stem}\n"
    assert said(*rpm, "--verify", COMMON, DAEMON) == ""
    shutil.rmtree(folder / "was")
