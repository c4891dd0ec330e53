"""The command blocks of docs/quickstart, run as a reader copies them, and what they print held against the page."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import cleanup, packages, pages
from tests.support.containerd import Containerd
from tests.support.daemon import ENVIRONMENT, TOPOLOGIES, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.image import ImageSpec
from tests.support.marks import on_newest
from tests.support.own_root import NRI, OwnRoot

PAGES: Final = TOPOLOGIES.parents[1] / "docs" / "quickstart"
DEBIAN: Final = ImageSpec("docker.io/library/debian:12")
ENDS: Final = re.compile(r"(.*?)@@(\d+)\n", re.DOTALL)  # of what one block prints, and the code of what failed in it
CGROUPS: Final = "k8s.io"  # where containerd puts pods that name no cgroup


class Installed(NriGpu):
    """nri-gpu on the paths of its package, with four simulated GPUs and a made-up driver."""

    def __init__(self, launch: Launch, root: OwnRoot) -> None:
        super().__init__(launch)
        self._root = root

    def program(self) -> list[str]:
        options = ("--gpus", self.launch.topology, "--driver-root", self.launch.driver_root)
        return self._root.words("nri-gpu", "run", *(str(each) for each in options))


@pytest.fixture
def root(runtime: packages.Runtime, tmp_path: Path) -> Iterator[OwnRoot]:
    """A machine as the page wants it: containerd, crictl, and nri-gpu serving."""
    kept = bool(cleanup.cgroups_named(CGROUPS))
    node = Containerd(runtime)
    try:
        made = OwnRoot(node)
        made.write_program(Path("/usr/local/bin/nri-gpu"), _program("nri_gpu"))
        made.write_program(Path("/usr/local/bin/crictl"), _crictl())
        with node:
            node.import_image(DEBIAN)
            launch = Launch(tmp_path / "d", NRI / "nri.sock", driver_root=make_driver_root(tmp_path / "driver"))
            with Installed(launch, made) as daemon:
                daemon.wait_staged()
                yield made
    finally:
        if not kept:
            cleanup.remove_cgroups(CGROUPS)


@on_newest
def test_one_machine(root: OwnRoot) -> None:
    follow(PAGES / "one-machine.md", lambda script: root.run(f"cd $(mktemp -d)\n{script}").stdout)


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_what_is_not_run_is_little(page: Path) -> None:
    """Most of a page is commands that a test runs."""
    found = pages.blocks(page)
    assert len([each for each in found if not each.not_run]) >= len(found) / 2


def follow(page: Path, shell: Callable[[str], str]) -> None:
    """Run a page's blocks in one shell, and compare what each prints and how it ends."""
    found = [each for each in pages.blocks(page) if not each.not_run]
    said = shell("".join(f"trap 'failed=$?' ERR; failed=0\n{each.script}echo \"@@$failed\"\n" for each in found))
    ran = ENDS.findall(said)
    for block, (printed, code) in zip(found, ran, strict=False):
        where = f"{page.name}:{block.line} exits with {code} and prints\n{printed}"
        assert int(code) == block.exit_code, where
        assert block.shown is None or pages.prints(block.shown, printed), where
    assert len(ran) == len(found), f"the shell ended early:\n{said}"


def _program(module: str) -> str:
    """A program of this tree's."""
    return f'#!/bin/sh\nPYTHONPATH={ENVIRONMENT["PYTHONPATH"]} exec {sys.executable} -m {module} "$@"\n'


def _crictl() -> str:
    """The real one where there is one, else what we have in its place."""
    found = os.environ.get("NRI_GPU_CRICTL") or shutil.which("crictl")
    return f'#!/bin/sh\nexec {found} "$@"\n' if found else _program("tests.support.crictl")
