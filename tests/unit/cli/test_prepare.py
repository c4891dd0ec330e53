"""`nri-gpu prepare`: its exit codes, what it prints, and the same as JSON; on a host below a temporary folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nri_gpu.cli import prepare
from nri_gpu.cli.main import main
from nri_gpu.domain.errors import Exit
from nri_gpu.host.facts import HostPaths
from tests.unit.cli.shapes import NUMBER, TEXT, TRUTH, array, check_shape, fields, schema
from tests.unit.host.host_tree import NVIDIA, UVM, HostTree, host_below, params

MODE = {"type": "string", "pattern": "^[0-7]{4}$"}
NODE = {"major": NUMBER, "minor": NUMBER, "mode": MODE, "uid": NUMBER, "gid": NUMBER}
PREPARE = fields(
    schema=schema("prepare"),
    dry_run=TRUTH,
    devices=array(TEXT),
    actions=array(
        {
            "oneOf": [
                fields(action={"const": "load-module"}, text=TEXT, module=TEXT),
                fields(
                    action={"const": "make-node"}, text=TEXT, path=TEXT, **NODE, replaces={"type": ["object", "null"]}
                ),
                fields(action={"const": "fix-node"}, text=TEXT, path=TEXT, **NODE, was=fields(**NODE)),
                fields(
                    action={"const": "make-link"},
                    text=TEXT,
                    path=TEXT,
                    target=TEXT,
                    replaces={"type": ["string", "null"]},
                ),
            ]
        }
    ),
    more_may_follow=TRUTH,
    findings=array(fields(path=TEXT, reason=TEXT)),
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostTree:
    """The machine that the verb works on; never the one that the tests run on."""
    host = host_below(tmp_path)
    monkeypatch.setattr(prepare, "PLACES", host.places)
    return host


def test_it_works_on_the_real_trees_by_default() -> None:
    assert HostPaths() == prepare.PLACES


def test_a_fresh_boot_then_nothing_to_do(machine: HostTree, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["load module nvidia", "load module nvidia-uvm"]
    assert f"make /dev/nvidia0: char {NVIDIA}:0, mode 0666, owner 0:0" in lines
    assert f"link /dev/char/{UVM}:0 to ../nvidia-uvm" in lines
    assert "nvidia0" in machine.entries()
    assert main(["prepare"]) == Exit.OK
    expected = "nothing to do: 2 NVIDIA devices, modules loaded, nodes and links in place\n"
    assert capsys.readouterr().out == expected


def test_dry_run_changes_nothing_and_needs_no_root(
    machine: HostTree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["prepare", "--dry-run", "--graphics"]) == Exit.OK
    assert capsys.readouterr().out.splitlines() == [
        "would load module nvidia",
        "would load module nvidia-uvm",
        "would load module nvidia-modeset",
        "more may follow: which devices a module serves is known once it is loaded",
    ]
    machine.loaded()
    assert main(["prepare", "--dry-run"]) == Exit.OK
    out = capsys.readouterr().out.splitlines()
    assert f"would make /dev/nvidia0: char {NVIDIA}:0, mode 0666, owner 0:0" in out
    assert not [line for line in out if not line.startswith("would ")]
    assert list(machine.entries()) == ["char"]
    assert not machine.calls()


def test_not_root(machine: HostTree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["prepare"]) == Exit.PERMISSION
    assert "only root" in capsys.readouterr().err
    assert not machine.calls()


def test_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prepare, "PLACES", HostPaths(tmp_path, tmp_path, tmp_path))
    for arguments in ([], ["--dry-run"], ["-o", "json"]):
        assert main(["prepare", *arguments]) == Exit.UNAVAILABLE
        printed = capsys.readouterr()
        assert printed.err == "nri-gpu: this machine has no NVIDIA display device on its PCI bus\n"
        assert printed.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]], ids=["done", "dry"])
def test_findings_are_1(machine: HostTree, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    machine.loaded().write("proc/driver/nvidia/params", params(modify=0))
    assert main(["prepare", *arguments]) == Exit.FINDING
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("finding: /dev/nvidiactl: is missing and should be")
    assert len(lines) == 5


def test_another_driver_root(machine: HostTree) -> None:
    assert main(["prepare", "--driver-root", "/run/nvidia/driver"]) == Exit.OK
    assert machine.calls()[0] == "-d /run/nvidia/driver nvidia []"


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]], ids=["done", "dry"])
def test_json(machine: HostTree, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    machine.loaded()
    machine.node("nvidia0", NVIDIA, 0, 0o600)
    machine.node("nvidia-uvm", NVIDIA, 9)
    machine.write("dev/nvidia1", "")
    (machine.dev / "char" / f"{UVM}:0").symlink_to("../gone")
    assert main(["prepare", "-o", "json", *arguments]) == Exit.FINDING
    document = json.loads(capsys.readouterr().out)
    check_shape(document, PREPARE)
    assert document["dry_run"] == bool(arguments)
    assert document["more_may_follow"] is False
    assert len(document["devices"]) == 2
    assert [finding["path"] for finding in document["findings"]] == ["/dev/nvidia1"]
    actions = {action.get("path", ""): action for action in document["actions"]}
    assert actions["/dev/nvidia0"]["action"] == "fix-node"
    assert actions["/dev/nvidia0"]["was"]["mode"] == "0600"
    assert actions["/dev/nvidia-uvm"]["replaces"] == {"major": NVIDIA, "minor": 9, "mode": "0666", "uid": 0, "gid": 0}
    assert actions["/dev/nvidia-uvm-tools"]["replaces"] is None
    assert actions[f"/dev/char/{UVM}:0"]["replaces"] == "../gone"


def test_json_of_a_dry_run_before_the_modules(machine: HostTree, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--dry-run", "-o", "json"]) == Exit.OK
    document = json.loads(capsys.readouterr().out)
    check_shape(document, PREPARE)
    assert document["more_may_follow"] is True
    assert [action["module"] for action in document["actions"]] == ["nvidia", "nvidia-uvm"]
    assert not machine.calls()
