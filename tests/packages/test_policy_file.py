"""The policy of the Debian package: copied once, then the administrator's, whatever is installed after that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from deploy import bundle
from deploy.debian import build
from tests.packages.conftest import AT, DAEMONS, Debs
from tests.packages.test_split import WHOLE_AT, seen_in, with_whole
from tests.support.debian_root import DebianRoot

POLICY: Final = f"/{bundle.POLICY}"
SCHEMA: Final = "/etc/nri-gpu/policy.schema.json"
EDITS: Final = {"untouched": "true", "edited": f"echo '# mine' >>{POLICY}", "removed": f"rm {POLICY}"}
__all__ = ["with_whole"]


@pytest.fixture
def whole(debs: Debs, whole_deb: Path, with_whole: Path) -> Iterator[DebianRoot]:
    """A Debian 12 with the package whose policy dpkg kept."""
    with DebianRoot("bookworm", {whole_deb: WHOLE_AT, debs.folder: AT}, over=with_whole) as root:
        yield root


def policy(root: DebianRoot) -> str | None:
    done = root.try_run("cat", POLICY)
    return None if done.returncode else done.stdout


def beside(root: DebianRoot) -> set[str]:
    return set(root.run("ls", "-A", "/etc/nri-gpu").split())


def unasked(root: DebianRoot, *words: str) -> None:
    """Run it with an end of file to whoever asks, at which dpkg fails."""
    assert "Configuration file" not in root.run(*words)


@pytest.mark.parametrize("edit", EDITS)
def test_an_upgrade_from_a_conffile_keeps_what_is_there(
    whole: DebianRoot, debs: Debs, whole_deb: Path, edit: str
) -> None:
    root, back = whole, seen_in(whole_deb, WHOLE_AT)
    shipped = policy(root)
    root.run("sh", "-c", f"{EDITS[edit]}; echo '{{}}' >{SCHEMA}")
    was = policy(root)
    assert (was == shipped) == (edit == "untouched")
    for words in (
        ("dpkg", "--auto-deconfigure", "--unpack", *debs.this),
        ("dpkg", "--configure", "-a"),
        ("dpkg", "-i", *debs.newer),
        ("dpkg", "-i", *debs.this),
    ):
        unasked(root, *words)
        assert policy(root) == was, words
        assert beside(root) == {"policy.schema.json", *(["policy.toml"] if was else [])}, words
    assert root.run("readlink", "-e", SCHEMA) == "/usr/share/nri-gpu/policy.schema.json\n"

    unasked(root, "apt", "install", "-y", "--allow-downgrades", back)
    was = was or shipped  # to the older package a policy that dpkg does not know is a new one
    assert policy(root) == was
    unasked(root, "apt", "install", "-y", *debs.this)
    assert policy(root) == was
    root.run("dpkg", "-P", *DAEMONS)
    assert not root.path.joinpath("etc/nri-gpu").exists()


def test_an_upgrade_that_is_aborted_and_taken_back(whole: DebianRoot, debs: Debs, whole_deb: Path) -> None:
    root = whole
    root.run("sh", "-c", EDITS["edited"])
    was = policy(root)
    root.run("dpkg", "--auto-deconfigure", "--unpack", *debs.this)
    unasked(root, "apt", "install", "-y", "--allow-downgrades", seen_in(whole_deb, WHOLE_AT))
    assert policy(root) == was
    assert beside(root) == {"policy.toml"}


def test_the_first_installation_alone_copies_it(bookworm: DebianRoot, debs: Debs) -> None:
    root = bookworm
    root.run("dpkg", "--unpack", *debs.this)  # and not configured, as when it is killed
    root.run("dpkg", "-r", *DAEMONS)
    assert policy(root) is None
    root.run("dpkg", "-i", *debs.this)
    assert policy(root) == build.SHIPPED.read_text()
    assert root.run("stat", "-c", "%a %U", POLICY) == "644 root\n"
    assert root.run("dpkg-query", "-W", "-f=${Conffiles}", *DAEMONS) == ""

    root.run("rm", POLICY)
    for words in (
        ("dpkg", "-i", *debs.newer),
        ("dpkg", "-r", *DAEMONS),
        ("dpkg", "-i", *debs.this),
        ("dpkg-reconfigure", "nri-gpu"),
    ):
        root.run(*words)
        assert policy(root) is None, words
    root.run("dpkg", "-P", *DAEMONS)
    root.run("dpkg", "-i", *debs.this)
    assert policy(root) == build.SHIPPED.read_text()


def test_a_policy_that_was_there_before_the_package_stays(bookworm: DebianRoot, debs: Debs) -> None:
    root = bookworm
    root.run("sh", "-c", f"mkdir /etc/nri-gpu && echo '# of a checkout' >{POLICY}")
    unasked(root, "dpkg", "-i", *debs.this)
    assert policy(root) == "# of a checkout\n"
    root.run("rm", "-r", "/usr/share/nri-gpu", "/usr/share/doc/nri-gpu", SCHEMA)  # half of it is gone
    unasked(root, "dpkg", "-i", *debs.this)
    assert policy(root) == "# of a checkout\n"
    assert root.run("dpkg", "-V", *DAEMONS) == ""
