"""`nri-gpu check`: all faults at once with their places, advice that fails nothing, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nri_gpu.cli import check
from nri_gpu.cli.main import main
from nri_gpu.daemon import policy_file as settings
from nri_gpu.domain.errors import Exit
from nri_gpu.driver.owner import StageOwner
from tests.support.daemon import FOUR_GPUS
from tests.unit.cli.shapes import CHECK, check_shape
from tests.unit.cli.test_status import daemon

CONFIG = Path(__file__).parents[3] / "config"
BAD = '[plugin]\nindex = 5\n\n[driver]\nrot = "/"\n'


def checked(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> tuple[int, str]:
    code = main(["check", str(path), *arguments])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("path", [CONFIG / "policy.toml", *sorted((CONFIG / "examples").glob("*.toml"))], ids=str)
def test_every_shipped_policy_is_good(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    code, text = checked(capsys, path)
    assert code == Exit.OK
    assert text.splitlines()[0] == f"{path}: ok"
    assert all(line.startswith("advice: ") for line in text.splitlines()[1:])
    code, document = checked(capsys, path, "-o", "json")
    assert code == Exit.OK
    check_shape(json.loads(document), CHECK)
    assert len(json.loads(document)["advice"]) == len(text.splitlines()) - 1


def test_faults_come_all_at_once_with_line_and_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(BAD)
    code, text = checked(capsys, path)
    assert code == Exit.CONFIGURATION
    first, *faults = text.splitlines()
    assert first == f"{path}: 2 faults"
    assert faults[0].startswith(f"{path}:2: plugin.index: must be a string")
    assert faults[1].startswith(f"{path}:5: driver.rot: unknown key")
    code, document = checked(capsys, path, "-o", "json")
    assert code == Exit.CONFIGURATION
    parsed = json.loads(document)
    check_shape(parsed, CHECK)
    assert [(fault["line"], fault["key"]) for fault in parsed["faults"]] == [(2, "plugin.index"), (5, "driver.rot")]
    assert parsed["advice"] == []


@pytest.mark.parametrize(("content", "words"), [(None, "no such file"), ("a b", "not TOML"), ("[a", "not TOML")])
def test_what_cannot_be_read_is_one_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "policy.toml"
    if content is not None:
        path.write_text(content)
    code, text = checked(capsys, path)
    assert code == Exit.CONFIGURATION
    assert text.startswith(f"{path}: 1 fault\n{path}:")
    assert words in text


def test_the_default_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_PATH", tmp_path / "policy.toml")
    monkeypatch.setattr(check, "DEFAULT_PATH", tmp_path / "policy.toml")
    assert main(["check"]) == Exit.OK
    assert capsys.readouterr().out.startswith("the built-in defaults: ok\n")
    (tmp_path / "policy.toml").write_text(BAD)
    assert main(["check"]) == Exit.CONFIGURATION


def test_a_file_others_may_write_gets_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("")
    path.chmod(0o666)
    code, text = checked(capsys, path)
    assert code == Exit.OK
    assert f"advice: {path} may be written by others" in text


POOLED = '[[pool]]\nname = "big"\nmodel = "*B200*"\nnamespaces = ["a"]\n'


def test_pools_are_held_against_a_topology(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POOLED)
    code, text = checked(capsys, path, "--gpus", str(FOUR_GPUS))
    assert code == Exit.OK
    assert 'advice: pool[0] "big" has no GPU of this node: its selectors fit none' in text
    path.write_text(POOLED.replace("*B200*", "*"))
    assert "has no GPU of this node" not in checked(capsys, path, "--gpus", str(FOUR_GPUS))[1]


def test_a_topology_that_cannot_be_read_is_a_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POOLED)
    assert main(["check", str(path), "--gpus", str(tmp_path / "none.toml")]) == Exit.CONFIGURATION
    assert "none.toml" in capsys.readouterr().err


def test_without_a_driver_it_is_said_that_pools_could_not_be_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f'{POOLED}[driver]\nroot = "{tmp_path}"\n')
    code, text = checked(capsys, path)
    assert code == Exit.OK
    assert "the pools cannot be compared with this node's GPUs: " in text


def test_mps_without_a_mount_for_what_clients_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("[mps]\nenabled = true\n")
    sentence = "every container that asks with mode=mps is refused: no file system of its own is mounted"
    assert sentence in checked(capsys, path, "--state-dir", str(tmp_path))[1]
    assert sentence not in checked(capsys, path, "--state-dir", str(tmp_path / "never served"))[1]
    path.write_text("")
    assert sentence not in checked(capsys, path, "--state-dir", str(tmp_path))[1]


def test_a_stage_folder_that_is_another_daemons_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[driver]\nstage_dir = "{tmp_path}/drivers"\n')
    owner = StageOwner(tmp_path / "drivers", tmp_path / "first")
    owner.take()
    owner.close()
    said = f"driver.stage_dir {tmp_path}/drivers belongs to the nri-gpu with state folder {tmp_path}/first, so one with"
    assert said in checked(capsys, policy)[1]
    assert said in checked(capsys, policy, "--state-dir", str(tmp_path / "second"))[1]
    assert said not in checked(capsys, policy, "--state-dir", str(tmp_path / "first"))[1]


CHARTS = '[kubelet]\npool = "cluster"\n\n[[pool]]\nname = "cluster"\nmodel = ["*"]\n'
OPTIONS = {"kubelet.enabled": True, "driver.root": "/driver-root", "topology": str(FOUR_GPUS)}


def test_the_options_of_the_running_daemon_go_before_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(CHARTS)
    assert "kubelet.enabled is not set" in checked(capsys, path, "--state-dir", str(folder))[1]
    kubelet = {"enabled": True, "guard_alone": "NRI 0.6"}
    with daemon(folder, json.dumps({"options": OPTIONS, "kubelet": kubelet}).encode()):
        code, text = checked(capsys, path, "--state-dir", str(folder))
    assert code == Exit.OK
    assert text.splitlines()[1].startswith('with the running daemon\'s options: driver.root = "/driver-root", kubelet')
    assert "kubelet: only the guard stops containers that start without their GPUs: NRI 0.6" in text.splitlines()
    assert "pool[0]" not in text
    assert "could not be held against" not in text
