"""What `driver` and `explain` say of CUDA's compatibility packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nri_gpu.cli.main import main
from nri_gpu.domain.errors import Exit
from tests.support import compat
from tests.support.daemon import FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.loading import LIBRARIES

V, NEWER = "580.95.05", "600.10.01"
PLACE, TREE = "/opt/nri-gpu/compat", LIBRARIES


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    packages = tmp_path / "packages"
    compat.make_package(packages, "14.0", NEWER, compat.note("14.0", (550, 580)))
    compat.make_package(packages, "14.1", "610.10.01", compat.note("14.1", (550,)))
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[compat]\ndir = "{packages}"\n')
    return ["--policy", str(policy), "--driver-root", str(make_driver_root(tmp_path / "root", V))]


def test_driver_lists_packages_and_what_is_left_out(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["driver", *options]) == Exit.OK
    said = capsys.readouterr().out
    assert f"  CUDA 14.0   libcuda {NEWER}, for drivers 550, 580\n" in said
    assert "  CUDA 14.1   libcuda 610.10.01, for drivers 550; NOT on this one: it is not made for driver 580" in said
    (tmp_path / "packages/14.1").rename(tmp_path / "packages/15.0")
    assert main(["driver", *options]) == Exit.FINDING
    assert "\n  15.0: its libcuda is for CUDA 14.1, which the folder is not named for" in capsys.readouterr().out


def test_driver_for_programs(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["driver", *options, "-o", "json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)["compat"]
    assert [(each["cuda"], each["version"], each["drivers"]) for each in found["packages"]] == [
        ("14.0", NEWER, [550, 580]),
        ("14.1", "610.10.01", [550]),
    ]
    assert [each["not_with_this_driver"] for each in found["packages"]] == ["", "it is not made for driver 580"]
    assert found["left_out"] == []


def test_a_folder_that_is_not_there_is_said(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "packages").rename(tmp_path / "elsewhere")
    assert main(["driver", *options]) == Exit.UNAVAILABLE
    assert f"compatibility packages in {tmp_path}/packages cannot be read" in capsys.readouterr().err


def pod(path: Path, **env: str) -> str:
    container = {"name": "main", "image": "x", "env": [{"name": name, "value": env[name]} for name in env]}
    metadata = {"name": "p", "annotations": {"gpu.nri.io": "1"}}
    path.write_text(json.dumps({"kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}))
    return str(path)


def test_explain_shows_which_and_why(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanting = pod(tmp_path / "pod.yaml", CUDA_VERSION="14.0.1")
    assert main(["explain", wanting, "--gpus", str(FOUR_GPUS), *options]) == Exit.OK
    said = capsys.readouterr().out
    assert f"  compat  CUDA 14.0 by libcuda {NEWER}, because CUDA 14.0 is wanted\n" in said
    assert f"  mount   {PLACE}  from " in said
    assert f"  env     LD_LIBRARY_PATH={PLACE}:{TREE}\n" in said
    assert main(["explain", wanting, "--gpus", str(FOUR_GPUS), *options, "-o", "json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["containers"][0]["compat"].startswith("CUDA 14.0 by ")


def test_explain_says_why_not(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanting = pod(tmp_path / "pod.yaml", CUDA_VERSION="14.1", NVIDIA_DISABLE_REQUIRE="1")
    assert main(["explain", wanting, "--gpus", str(FOUR_GPUS), *options]) == Exit.OK
    assert "  compat  CUDA 14.1 is wanted, and no package serves (" in capsys.readouterr().out
