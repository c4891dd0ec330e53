"""What a scheduler is told of a node, in the names of NVIDIA's feature discovery."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.inventory.labels import family, file_text, labels, machine_name, value_of
from nri_gpu.inventory.topology import load_topology
from tests.support import builders as make

TOPOLOGIES = Path(__file__).parents[3] / "config" / "topologies"
# Kubernetes: apimachinery/pkg/util/validation (IsValidLabelValue, IsQualifiedName).
VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
NAME = re.compile(r"nvidia\.com/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def test_a_node_with_whole_gpus() -> None:
    found = labels(load_topology(TOPOLOGIES / "hgx-h100.toml"), "PowerEdge XE9680")
    assert found == {
        "nvidia.com/cuda.driver-version.full": "580.95.05",
        "nvidia.com/cuda.driver-version.major": "580",
        "nvidia.com/cuda.driver-version.minor": "95",
        "nvidia.com/cuda.driver-version.revision": "05",
        "nvidia.com/cuda.driver.major": "580",
        "nvidia.com/cuda.driver.minor": "95",
        "nvidia.com/cuda.driver.rev": "05",
        "nvidia.com/cuda.runtime-version.full": "13.0",
        "nvidia.com/cuda.runtime-version.major": "13",
        "nvidia.com/cuda.runtime-version.minor": "0",
        "nvidia.com/cuda.runtime.major": "13",
        "nvidia.com/cuda.runtime.minor": "0",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/gpu.count": "8",
        "nvidia.com/gpu.family": "hopper",
        "nvidia.com/gpu.machine": "PowerEdge-XE9680",
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    }


def test_gpus_in_mig_mode_are_counted_by_their_devices() -> None:
    found = labels(load_topology(TOPOLOGIES / "mig-a100.toml"))
    told = {name.removeprefix("nvidia.com/"): value for name, value in found.items() if ".count" in name}
    profiles = {"1g.10gb": "3", "2g.20gb": "1", "3g.40gb": "1", "1c.3g.40gb": "1", "2c.3g.40gb": "1"}
    assert told == {"gpu.count": "1"} | {f"mig-{profile}.count": number for profile, number in profiles.items()}
    assert found["nvidia.com/mig.strategy"] == "mixed"
    assert found["nvidia.com/mig-3g.40gb.product"] == "NVIDIA-A100-80GB-PCIe-MIG-3g.40gb"
    assert found["nvidia.com/mig-3g.40gb.memory"] == "40192"


def test_of_several_models_the_one_there_are_most_of() -> None:
    small = {"model": "Tesla T4", "memory_bytes": 16 << 30, "arch": (7, 5)}
    found = labels(make.inventory((make.gpu(0, **small), make.gpu(1), make.gpu(2))))
    assert found["nvidia.com/gpu.count"] == "3"
    assert found["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB"
    assert found["nvidia.com/gpu.compute.major"] == "8"


def test_a_node_without_gpus_says_so() -> None:
    assert labels(make.inventory((), driver_version="", cuda_version="")) == {"nvidia.com/gpu.count": "0"}


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ((7, 0), "volta"), ((7, 5), "turing"), ((8, 0), "ampere"), ((8, 6), "ampere"), ((8, 9), "ada-lovelace"),
        ((9, 0), "hopper"), ((10, 0), "blackwell"), ((12, 0), "blackwell"), ((13, 0), "rubin"), ((2, 0), ""),
    ],
)  # fmt: skip
def test_families(arch: tuple[int, int], name: str) -> None:
    assert family(arch) == name


@given(st.text(max_size=120))
def test_any_name_becomes_a_value(text: str) -> None:
    assert VALUE.fullmatch(value_of(text))


def test_every_name_and_value_is_one_kubernetes_takes() -> None:
    for file in sorted(TOPOLOGIES.glob("*.toml")):
        for name, value in labels(load_topology(file), "A machine, (R) of 2026").items():
            assert NAME.fullmatch(name), name
            assert VALUE.fullmatch(value), value


def test_a_profile_with_an_attribute() -> None:
    found = labels(make.inventory((make.mig_gpu(profiles=("1g.10gb+me",)),)))
    assert found["nvidia.com/mig-1g.10gb.me.count"] == "1"


def test_lines_in_order() -> None:
    assert file_text({"b": "2", "a": "1"}) == "a=1\nb=2\n"


def test_the_machine_is_told_where_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "product_name").write_text("PowerEdge XE9680\n")
    assert machine_name(tmp_path / "product_name") == "PowerEdge XE9680"
    assert not machine_name(tmp_path / "missing")
