"""Packages that are built twice, from trees that were laid out at two times in two folders: the same, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from deploy import bundle
from deploy.debian import build as debian
from deploy.rpm import build as rpm
from tests.packages.conftest import Debs
from tests.packages.test_rpm import said
from tests.support import packages


@pytest.fixture
def again(tmp_path: Path) -> Path:
    """The files of all packages, laid out once more."""
    tree = tmp_path / "again"
    tree.mkdir()
    bundle.lay_out(tree)
    return tree


def differing(paths: Iterable[Path], folder: Path) -> list[str]:
    """The names of those that have another content in the folder."""
    return [path.name for path in paths if path.read_bytes() != (folder / path.name).read_bytes()]


def test_both_kinds_of_packages_can_be_made_again(
    debs: Debs, laid_out: Path, again: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = debs.files()[0].read_bytes()[24:36].decode().strip()  # the time of an ar archive's first member
    monkeypatch.setenv("SOURCE_DATE_EPOCH", released)
    rpmbuild = packages.command("rpmbuild", "rpm")
    rpms = rpm.pack(laid_out, tmp_path / "rpms", "w0.ufdio", rpmbuild)
    rpm.pack(again, tmp_path / "rpms-again", "w0.ufdio", rpmbuild)
    debian.pack(again, tmp_path / "debs-again", "none")
    assert differing(rpms, tmp_path / "rpms-again") == []
    assert differing(debs.files(bundle.PACKAGES), tmp_path / "debs-again") == []
    assert said(
        *packages.command("rpm"), "--query", "--queryformat=%{BUILDHOST}\n", "--package", *rpms
    ) == "localhost\n" * len(rpms)
