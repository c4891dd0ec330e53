"""`nri-gpu driver`: what was found and what was not, for people and for programs."""

import json
from pathlib import Path

import pytest

from nri_gpu.cli.main import main
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.gpu import Capability
from tests.support.driver_root import make_driver_root, write_library

V = "580.95.05"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("nri_gpu.daemon.policy_file.DEFAULT_PATH", tmp_path / "no-policy.toml")
    return make_driver_root(tmp_path / "root", V, everything=True)


def test_each_capability_has_its_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["driver", "--driver-root", str(root)]) == Exit.OK
    text = capsys.readouterr().out
    assert all(f"\n{capability}\n" in text for capability in Capability)
    assert f"  library  lib64/libcuda.so.{V} as libcuda.so.1, libcuda.so\n" in text
    assert "  file     etc/OpenCL/vendors/nvidia.icd as /etc/OpenCL/vendors/nvidia.icd\n" in text
    assert "missing" not in text


def test_what_is_missing_left_out_and_unknown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / f"lib64/libnvidia-encode.so.{V}").unlink()
    (root / f"lib64/libnvcuvid.so.{V}").chmod(0o777)
    write_library(root / f"lib64/libnvidia-newthing.so.{V}", "")
    assert main(["driver", "--driver-root", str(root)]) == Exit.FINDING
    text = capsys.readouterr().out
    assert "  missing  libnvcuvid.so, libnvidia-encode.so\n" in text
    assert f"  lib64/libnvcuvid.so.{V}: owner 0, mode 0777: others than root can change it\n" in text
    assert text.endswith(f"no container gets them\n  libnvidia-newthing.so.{V}\n")


def test_for_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["driver", "--driver-root", str(root), "-o", "json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["version"], found["root"]) == ("nri-gpu/driver/v1", V, str(root))
    assert set(found["capabilities"]) == set(Capability)
    assert {each["name"] for each in found["capabilities"]["ngx"]["files"]} == {f"libnvidia-ngx.so.{V}"}


def test_no_driver_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["driver", "--driver-root", str(tmp_path)]) == Exit.UNAVAILABLE
    assert f"{tmp_path}/usr/lib64" in capsys.readouterr().err


def test_folders_of_the_policy(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "lib64").rename(root / "odd")
    policy = tmp_path / "policy.toml"
    policy.write_text('[driver]\nlibrary_dirs = ["/odd"]\n')
    assert main(["driver", "--driver-root", str(root)]) == Exit.UNAVAILABLE
    assert main(["driver", "--policy", str(policy), "--driver-root", str(root)]) == Exit.OK
    assert f"odd/libcuda.so.{V}" in capsys.readouterr().out
