"""The command blocks of docs/quickstart, run as a reader copies them, and what they print held against the page."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import Final

import pytest
import yaml

from tests.support import pages
from tests.support.containerd import Containerd
from tests.support.helm import Helm
from tests.support.marks import on_newest
from tests.support.own_image import own_image
from tests.support.waiting import wait_for

ROOT: Final = pages.FOLDER.parents[1]


@on_newest
def test_k3s(node: Containerd, tmp_path: Path) -> None:
    """With K3s's programs stood in for: the image that the page brings in is the one that the chart asks for."""
    helm = Helm("helm4", tmp_path)
    rendered = tmp_path / "rendered.yaml"
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    programs = {
        "make": f'[ "$*" = image ] && mkdir dist && cp {own_image()} dist',
        "k3s": f'[ "$1" = ctr ] && exec {node.runtime.ctr} --address {node.cri_socket} "${{@:2}}"',
        "kubectl": f'{quote(sys.executable)} -m tests.support.kubectl_check "$@"',
        "helm": f'[ "$1" = install ] && {helm.path} template --skip-tests {helm.kube_version} "${{@:2}}" | '
        f"tee {rendered} | kubectl apply -f -",
    }
    environment = {**helm.environment, "PYTHONPATH": str(ROOT)}
    pages.follow(pages.FOLDER / "k3s.md", pages.shell(tmp_path, programs, environment))
    daemons = [each for each in yaml.safe_load_all(rendered.read_text()) if each and each["kind"] == "DaemonSet"]
    assert {each["metadata"]["name"] for each in daemons} == {"nri-gpu", "nri-gpu-guard"}
    for container in (each for daemon in daemons for each in daemon["spec"]["template"]["spec"]["containers"]):
        assert container["imagePullPolicy"] == "IfNotPresent"
        wait_for(container["image"], lambda name=container["image"]: node.cri.has_image(name), 30.0)  # type: ignore[misc]


@pytest.mark.parametrize("page", sorted(pages.FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_what_is_not_run_is_little(page: Path) -> None:
    """Most of a page is commands that a test runs."""
    found = pages.blocks(page)
    assert len([each for each in found if not each.not_run]) >= len(found) / 2
