"""Node labels in the names of NVIDIA's feature discovery, and the file that has them."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.node import GpuFault, Inventory
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.kubelet.node_labels import LabelController, machine_name, node_labels, value_of
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from nri_gpu.policy.model import Policy
from nri_gpu.policy.plugin_settings import LabelSettings
from nri_gpu.policy.read import parse_policy
from nri_gpu.system.state import NodeState
from tests.support import builders as make
from tests.support.scripted_runtime import until

OFF = KubeletSettings()

TOPOLOGIES = Path(__file__).parents[3] / "config" / "topologies"
# Kubernetes: apimachinery/pkg/util/validation (IsValidLabelValue, IsQualifiedName).
VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
NAME = re.compile(r"nvidia\.com/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def test_a_node_with_whole_gpus() -> None:
    found = node_labels(load_topology(TOPOLOGIES / "hgx-h100.toml"), "PowerEdge XE9680", OFF)
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


WHOLE = make.gpus(2)
ALIKE = (make.mig_gpu(0), make.mig_gpu(1))  # two 1g.5gb each
HALF = (make.gpu(0), make.mig_gpu(1))
EMPTY = (make.mig_gpu(0), make.mig_gpu(1, ()))
PROFILES = (make.mig_gpu(0, ("1g.5gb", "2g.10gb+me", "1c.3g.20gb")), make.mig_gpu(1, ()))
A100 = "NVIDIA-A100-SXM4-40GB"

CAPABLE = {"mig.capable": "true"}
SINGLE, MIXED = {"mig.strategy": "single"}, {"mig.strategy": "mixed"}
NONE_WHOLE = {"gpu.product": A100, "gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none"}
NONE_MIG = NONE_WHOLE | CAPABLE | {"gpu.replicas": "0"}  # no whole GPU of that model could be shared
INVALID = SINGLE | CAPABLE | {"gpu.product": f"{A100}-MIG-INVALID", "gpu.count": "0", "gpu.replicas": "0"}
RENAMED = {"gpu.product": A100, "gpu.count": "2", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"}
SHARED = RENAMED | {"gpu.product": f"{A100}-SHARED"}


def of_mig(resource: str, product: str, count: int, slices: str = "1", replicas: str = "1") -> dict[str, str]:
    return {
        f"{resource}.product": f"{A100}-MIG-{product}",
        f"{resource}.count": str(count),
        f"{resource}.replicas": replicas,
        f"{resource}.sharing-strategy": "none" if replicas == "1" else "time-slicing",
        f"{resource}.slices.gi": slices,
        f"{resource}.slices.ci": slices,
    }


ONE_KIND: dict[str, Any] = {"mig_strategy": "single"}
EACH_PROFILE: dict[str, Any] = {"mig_strategy": "mixed"}
# As NVIDIA/k8s-device-plugin labels such nodes (internal/lm/resource.go, mig-strategy.go), but for what is not offered.
STRATEGIES = {
    "none, whole GPUs": (WHOLE, {}, NONE_WHOLE),
    "none, half in MIG mode": (HALF, {}, NONE_WHOLE | CAPABLE),
    "none, all in MIG mode": (ALIKE, {}, NONE_MIG),
    "single, whole GPUs": (WHOLE, ONE_KIND, NONE_WHOLE | SINGLE),
    "single, all alike": (ALIKE, ONE_KIND, SINGLE | CAPABLE | of_mig("gpu", "1g.5gb", 4)),
    "single, half": (HALF, ONE_KIND, INVALID),
    "single, one empty": (EMPTY, ONE_KIND, INVALID),
    "single, two profiles": (PROFILES[:1], ONE_KIND, INVALID),
    "mixed, whole GPUs": (WHOLE, EACH_PROFILE, NONE_WHOLE | MIXED),
    "mixed, half": (HALF, EACH_PROFILE, NONE_WHOLE | MIXED | CAPABLE | of_mig("mig-1g.5gb", "1g.5gb", 2)),
    "mixed, an attribute, and none of what is not offered": (
        PROFILES,
        EACH_PROFILE,
        NONE_MIG | MIXED | of_mig("mig-1g.5gb", "1g.5gb", 1) | of_mig("mig-2g.10gb.me", "2g.10gb.me", 1, "2"),
    ),
    "replicas": (WHOLE, {"replicas": 4}, SHARED),
    "replicas, renamed": (WHOLE, {"replicas": 4, "rename": True}, RENAMED),
    "replicas, half in MIG mode": (HALF, {"replicas": 4}, SHARED | CAPABLE),
    "replicas, all in MIG mode": (ALIKE, {"replicas": 4}, NONE_MIG),
    "replicas, single": (
        ALIKE,
        ONE_KIND | {"replicas": 4},
        SINGLE | CAPABLE | of_mig("gpu", "1g.5gb-SHARED", 4, replicas="4"),
    ),
    "replicas, mixed, renamed": (
        HALF,
        EACH_PROFILE | {"replicas": 4, "rename": True},
        RENAMED | MIXED | CAPABLE | of_mig("mig-1g.5gb", "1g.5gb", 2, replicas="4"),
    ),
    "another resource's name": (WHOLE, {"resource": "example.com/gpu", "pool": "cluster"}, NONE_WHOLE),
    "no GPU": ((), EACH_PROFILE, {"gpu.count": "0"}),
}


@pytest.mark.parametrize(("gpus", "settings", "expected"), STRATEGIES.values(), ids=STRATEGIES)
def test_what_the_kubelet_is_offered(gpus: Sequence[Gpu], settings: dict[str, Any], expected: dict[str, str]) -> None:
    found = node_labels(make.inventory(gpus), "", convert(settings | {"enabled": True}, KubeletSettings))
    aside = ("memory", "family", "compute.major", "compute.minor")
    told = {name.removeprefix("nvidia.com/"): value for name, value in found.items() if "cuda" not in name}
    assert {name: value for name, value in told.items() if not name.endswith(aside)} == expected


T4 = make.gpu(0, model="Tesla T4", memory_bytes=16 << 30, arch=(7, 5))
UNKNOWN = make.gpu(0, memory_bytes=None, arch=None)
FAMILIES = {"turing": (7, 5), "ampere": (8, 6), "ada-lovelace": (8, 9), "blackwell": (12, 0), None: (2, 0)}
# Labels below nvidia.com/gpu of such GPUs; None: there is none.
FACTS: dict[str, tuple[Sequence[Gpu], dict[str, Any], dict[str, str | None]]] = {
    "what is not known": ([UNKNOWN], {}, {"memory": None, "family": None, "compute.major": None, "count": "1"}),
    "what is not known of one": ([make.gpu(0), make.gpu(1, memory_bytes=None)], {}, {"memory": None}),
    "memory of whole GPUs": (WHOLE, ONE_KIND, {"memory": str((WHOLE[0].memory_bytes or 0) >> 20)}),
    "memory of MIG devices": (ALIKE, ONE_KIND, {"memory": str((ALIKE[0].mig[0].memory_bytes or 0) >> 20)}),
    "memory of nothing that is offered": (HALF, ONE_KIND, {"memory": "0"}),
    "the model there are most of": (
        [T4, make.gpu(1), make.gpu(2)],
        {},
        {"count": "3", "product": A100, "compute.major": "8"},
    ),
    **{f"family {name}": ([make.gpu(0, arch=arch)], {}, {"family": name}) for name, arch in FAMILIES.items()},
}


@pytest.mark.parametrize(("gpus", "settings", "labels"), FACTS.values(), ids=FACTS)
def test_facts_of_gpus(gpus: Sequence[Gpu], settings: dict[str, Any], labels: dict[str, str | None]) -> None:
    found = node_labels(make.inventory(gpus), "", convert(settings | {"enabled": True}, KubeletSettings))
    assert {name: found.get(f"nvidia.com/gpu.{name}") for name in labels} == labels


def test_without_the_kubelet_nobody_counts_replicas_and_annotations_ask_by_profile() -> None:
    found = node_labels(load_topology(TOPOLOGIES / "mig-a100.toml"), "", KubeletSettings(replicas=4))
    told = {name.removeprefix("nvidia.com/"): value for name, value in found.items() if ".count" in name}
    profiles = {"1g.10gb": "3", "2g.20gb": "1", "3g.40gb": "1", "1c.3g.40gb": "1", "2c.3g.40gb": "1"}
    assert told == {"gpu.count": "4"} | {f"mig-{profile}.count": number for profile, number in profiles.items()}
    assert found["nvidia.com/mig-3g.40gb.product"] == "NVIDIA-A100-80GB-PCIe-MIG-3g.40gb"
    assert found["nvidia.com/mig-3g.40gb.memory"] == "40192"
    assert (found["nvidia.com/mig-2c.3g.40gb.slices.gi"], found["nvidia.com/mig-2c.3g.40gb.slices.ci"]) == ("3", "2")
    assert not [name for name in found if "replicas" in name or "sharing" in name or "strategy" in name]


LONG = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
MODELS = st.one_of(st.text(max_size=120), st.sampled_from([LONG, f"{LONG} (R) ", "NVIDIA H100 80GB HBM3"]))
KINDS = ("1g.24gb", "1g.24gb+gfx", "1g.24gb-me", "2g.48gb+me.all", "1c.3g.40gb")


@given(MODELS, st.sampled_from([(), KINDS[:2], *zip(KINDS, strict=True)]), st.sampled_from(MigStrategy), st.booleans())
def test_any_model_becomes_a_value_that_ends_in_its_kind(
    model: str, profiles: tuple[str, ...], strategy: MigStrategy, shared: bool
) -> None:
    gpu = make.mig_gpu(0, profiles, model=model) if profiles else make.gpu(0, model=model)
    offered = KubeletSettings(enabled=True, mig_strategy=strategy, replicas=64 if shared else 1)
    found = node_labels(make.inventory([gpu]), model, offered)
    assert not [value for value in found.values() if not VALUE.fullmatch(value)]
    kinds = {f"mig-{profile.replace('+', '.')}": f"-MIG-{profile.replace('+', '.')}" for profile in profiles}
    whole = "gpu", ""
    if strategy is MigStrategy.SINGLE and profiles:
        whole = "gpu", kinds.popitem()[1] if len(profiles) == 1 else "-MIG-INVALID"
    for resource, kind in [whole, *kinds.items()]:
        name = f"nvidia.com/{resource}"
        if product := found.get(f"{name}.product"):
            end = "-SHARED" if found.get(f"{name}.sharing-strategy") == "time-slicing" else ""
            assert product == value_of(model, kind + end)


def test_a_long_model_is_cut_before_its_kind() -> None:
    name = "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition"
    assert value_of(LONG, "-MIG-INVALID") == f"{name[:51]}-MIG-INVALID"
    assert value_of(LONG, "-MIG-1g.24gb-SHARED") == f"{name[:44]}-MIG-1g.24gb-SHARED"
    assert value_of(LONG[:8]) == "NVIDIA-R"


def test_every_name_and_value_is_one_kubernetes_takes() -> None:
    for file in sorted(TOPOLOGIES.glob("*.toml")):
        for strategy in MigStrategy:
            offered = KubeletSettings(enabled=True, mig_strategy=strategy, replicas=64)
            for name, value in node_labels(load_topology(file), "A machine, (R) of 2026", offered).items():
                assert NAME.fullmatch(name), name
                assert VALUE.fullmatch(value), value


def test_the_machine_is_told_where_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "product_name").write_text("PowerEdge XE9680\n")
    assert machine_name(tmp_path / "product_name") == "PowerEdge XE9680"
    assert not machine_name(tmp_path / "missing")


def on_node(file: Path, gpus: int = 2) -> NodeState:
    return NodeState(make.inventory(make.gpus(gpus)), policy=with_file(file))


def with_file(file: Path | str) -> Policy:
    return replace(Policy.default(), labels=LabelSettings(file=str(file)))


GONE = GpuFault(1, "GPU is lost (15)")
DARK = make.gpu(0, model="unknown", memory_bytes=None, arch=None, unavailable="GPU is lost")
# As NVML shows a node with a lost GPU: it cannot name the GPU, or not describe it, or lists it no more.
WITH_LOST = {
    "not named": (make.inventory([make.gpu(0)], faults=(GONE,)), "2", A100),
    "the only one": (make.inventory((), faults=(GONE,)), "1", None),
    "not described": (make.inventory([DARK, make.gpu(1)]), "2", A100),
    "the only one, not described": (make.inventory([DARK]), "1", None),
}


@pytest.mark.parametrize(("inventory", "count", "product"), WITH_LOST.values(), ids=WITH_LOST)
def test_a_lost_gpu_is_counted_and_describes_no_node(inventory: Inventory, count: str, product: str | None) -> None:
    found = node_labels(inventory, "", replace(OFF, enabled=True))
    assert (found["nvidia.com/gpu.count"], found.get("nvidia.com/gpu.product")) == (count, product)


def look(node_state: NodeState, kubelet: KubeletSettings = OFF) -> LabelController:
    """A controller that has written the labels."""
    controller = LabelController(node_state, kubelet, machine="")
    assert asyncio.run(controller.look())
    return controller


def test_the_file_follows_the_gpus(tmp_path: Path) -> None:
    file = tmp_path / "nri-gpu"
    node_state = on_node(file)
    before = os.umask(0o077)  # as the unit has it
    try:
        controller = look(node_state)
    finally:
        os.umask(before)
    assert "nvidia.com/gpu.count=2\n" in file.read_text()
    assert file.read_text().splitlines() == sorted(file.read_text().splitlines())
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    inode = file.stat().st_ino
    for inventory in (make.inventory(make.gpus(2), taken_at=99.0), make.inventory((), fault="it is being replaced")):
        node_state.put_inventory(inventory)  # the same, and nothing known
        assert asyncio.run(controller.look())
        assert file.stat().st_ino == inode
    node_state.put_inventory(make.inventory(make.gpus(3)))
    assert asyncio.run(controller.look())
    assert "nvidia.com/gpu.count=3\n" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["nri-gpu"]


def test_the_file_moves_with_the_policy_and_goes(tmp_path: Path) -> None:
    node_state = on_node(tmp_path / "one")
    controller = look(node_state)
    for name in ("two", ""):
        node_state.use(with_file(tmp_path / name if name else ""))
        assert asyncio.run(controller.look())
        assert [path.name for path in tmp_path.iterdir()] == [name] * bool(name)


def test_a_missing_folder_is_said_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "features.d"

    async def scenario() -> None:
        controller = LabelController(on_node(folder / "nri-gpu"), OFF, retry_s=0.01, machine="")
        assert not await controller.look()
        running = asyncio.create_task(controller.run())
        controller.again.set()
        folder.mkdir()
        await until("the file", (folder / "nri-gpu").is_file)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_the_file_tells_of_the_device_plugin_as_it_runs(tmp_path: Path) -> None:
    look(on_node(tmp_path / "nri-gpu"), KubeletSettings(enabled=True, replicas=4))
    assert "nvidia.com/gpu.replicas=4\n" in (tmp_path / "nri-gpu").read_text()


L40S = [make.gpu(at, model="NVIDIA L40S", memory_bytes=48 << 30) for at in (0, 1)]
L40S_POOL = {"name": "l40s", "model": "*L40S*"}


def test_the_resource_of_a_pool_has_labels_of_its_own() -> None:
    """What is said of all GPUs stays as it is."""
    settings = {"enabled": True, "replicas": 2, "resources": {"nvidia.com/l40s": "l40s", "b.io/gpu": "none"}}
    pools = [L40S_POOL, {"name": "none", "model": "*B200*"}]
    policy = parse_policy({"kubelet": settings, "pool": pools}, "p.toml")
    inventory = make.inventory([*L40S, *WHOLE[:1]])
    found = node_labels(inventory, "", policy.kubelet, policy.pool)
    plain = node_labels(inventory, "", replace(policy.kubelet, resources=()), policy.pool)
    assert {name: value for name, value in found.items() if name not in plain} == {
        "nvidia.com/l40s.product": "NVIDIA-L40S-SHARED",
        "nvidia.com/l40s.count": "2",
        "nvidia.com/l40s.memory": "49152",
        "nvidia.com/l40s.replicas": "2",
        "nvidia.com/l40s.sharing-strategy": "time-slicing",
        "b.io/gpu.count": "0",
    }
    assert found.items() >= plain.items()
    off = node_labels(inventory, "", replace(policy.kubelet, enabled=False), policy.pool)
    assert not any(name.startswith(("nvidia.com/l40s", "b.io")) for name in off)


def test_the_resource_of_a_pool_in_mig_mode_by_strategy_single() -> None:
    settings = {"enabled": True, "mig_strategy": "single", "resources": {"nvidia.com/small": "small"}}
    policy = parse_policy({"kubelet": settings, "pool": [{"name": "small", "device": ["0"]}]}, "p.toml")
    found = node_labels(make.inventory([ALIKE[0], WHOLE[1]]), "", policy.kubelet, policy.pool)
    assert found["nvidia.com/small.product"] == f"{A100}-MIG-1g.5gb"
    assert found["nvidia.com/small.count"] == str(len(ALIKE[0].mig))
