"""Topology files: what is shipped, and every fault at once."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from nri_gpu.domain.node import Inventory, Link, Majors, NumaNode
from nri_gpu.inventory.formats import ARCHITECTURES
from nri_gpu.requirements import grammar as facts
from nri_gpu.simulation.topology import TopologyError, load_topology, parse_topology
from nri_gpu.system.kernel_modules import MODULES

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "config/topologies").glob("*.toml"))
FIXTURES = sorted((ROOT / "tests/fixtures/gpus").glob("*.toml"))

NODE = "schema = 1\n[node]\n"
GPU = """[[gpu]]
index = 0
minor = 0
uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
bus_id = "0000:3b:00.0"
model = "NVIDIA H100 80GB HBM3"
memory_bytes = 85_520_809_984
arch = "9.0"
"""
SECOND = """[[gpu]]
index = 1
minor = 1
uuid = "GPU-11234567-89ab-cdef-0123-456789abcdef"
bus_id = "0000:3c:00.0"
model = "NVIDIA H100 80GB HBM3"
memory_bytes = 85_520_809_984
arch = "9.0"
"""
LINK = '[[link]]\na = 0\nb = 1\npcie = "PIX"\n'


def parse(text: str) -> Inventory:
    return parse_topology(text, "node.toml", 5.0)


def faults(text: str) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        parse(text)
    assert all(str(fault) in str(caught.value) for fault in caught.value.faults)
    return [f"{fault.key}: {fault.message}" for fault in caught.value.faults]


def test_the_five_of_the_contracts_are_shipped_and_one_with_mig() -> None:
    assert {path.stem for path in SHIPPED} == {
        "four-gpus",
        "hgx-h100",
        "dgx-a100",
        "pcie-8",
        "none",
        "mig-a100",
        "dgx1-v100",
        "troubled-node",
    }


@pytest.mark.parametrize("path", [*SHIPPED, *FIXTURES], ids=lambda path: path.stem)
def test_every_file_parses(path: Path) -> None:
    inventory = load_topology(path, wall=lambda: 7.0)
    assert inventory.simulated
    assert inventory.taken_at == 7.0
    assert inventory.fault == ""
    assert [gpu.index for gpu in inventory.gpus] == list(range(len(inventory.gpus)))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_list_every_pair(path: Path) -> None:
    inventory = load_topology(path)
    assert [(link.a, link.b) for link in inventory.links] == list(combinations(range(len(inventory.gpus)), 2))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_simulated_dynamic_majors_are_out_of_any_drivers_reach(path: Path) -> None:
    majors = load_topology(path).majors
    assert majors.nvidia in (None, 195)
    assert all(major is None or major > 511 for major in (majors.nvidia_uvm, majors.nvidia_caps))


def test_shipped_uuids_differ_in_their_first_letters() -> None:
    for path in SHIPPED:
        uuids = [unit.uuid for unit in load_topology(path).units]
        assert len({uuid[:6] for uuid in uuids}) == len(uuids)


def test_hgx_is_wired_as_told() -> None:
    inventory = load_topology(ROOT / "config/topologies/hgx-h100.toml")
    assert {link.nvlink for link in inventory.links} == {18}
    assert {gpu.numa_node for gpu in inventory.gpus} == {0, 1}


def test_pcie_8_has_every_kind_of_path() -> None:
    inventory = load_topology(ROOT / "config/topologies/pcie-8.toml")
    assert {link.pcie for link in inventory.links} == {"PIX", "PXB", "NODE", "SYS"}


def test_dgx_has_minors_unlike_indices() -> None:
    inventory = load_topology(ROOT / "config/topologies/dgx-a100.toml")
    assert any(gpu.minor_number != gpu.index for gpu in inventory.gpus)


def test_fixtures_show_mig_and_a_lost_gpu() -> None:
    mig, lost = (load_topology(ROOT / "tests/fixtures/gpus" / name) for name in ("mig.toml", "one-lost.toml"))
    assert [gpu.mig_enabled for gpu in mig.gpus] == [False, True]
    assert [bool(gpu.unavailable) for gpu in lost.gpus] == [False, False, True, False]
    assert lost.majors == Majors(nvidia=195, nvidia_uvm=1510, nvidia_caps=None)


MIG = """[[gpu.mig]]
uuid = "MIG-01234567-89ab-5def-8123-456789abcdef"
profile = "1g.10gb"
gi = 9
ci = 0
memory_bytes = 10_200_547_328
"""


def test_a_mig_device_has_the_minors_that_drivers_use() -> None:
    """By the GPU's minor, here 0: 3 + 135 * 0 + 9 * 9."""
    (gpu,) = parse(NODE + GPU + MIG).gpus
    assert gpu.mig_enabled
    (device,) = gpu.mig
    assert (device.index, device.profile, device.gpu_instance_minor, device.compute_instance_minor) == (
        *(0, "1g.10gb"),
        *(84, 85),
    )
    (other,) = parse(NODE + GPU.replace("minor = 0", "minor = 2") + MIG).gpus[0].mig
    assert (other.gpu_instance_minor, other.compute_instance_minor) == (354, 355)


def test_minors_may_be_said() -> None:
    (device,) = parse(NODE + GPU + MIG + "gi_minor = 7\nci_minor = 8\n").gpus[0].mig
    assert (device.gpu_instance_minor, device.compute_instance_minor) == (7, 8)


def test_beyond_the_capabilities_there_are_minors_are_not_made_up() -> None:
    (device,) = parse(NODE + GPU.replace("minor = 0", "minor = 40") + MIG).gpus[0].mig
    assert (device.gpu_instance_minor, device.compute_instance_minor) == (None, None)


MIG_FAULTS = {
    "a profile of none": (MIG.replace("1g.10gb", "10gb"), "profile: '10gb' is not a MIG profile"),
    "a gpu's uuid": (MIG.replace("MIG-", "GPU-"), "uuid: 'GPU-"),
    "no gi": (MIG.replace("gi = 9\n", ""), "gi: missing"),
    "gi": (MIG.replace("gi = 9", "gi = 15"), "gi: 15 is not from 0 to 14"),
    "ci": (MIG.replace("ci = 0", "ci = 8"), "ci: 8 is not from 0 to 7"),
    "minor": (MIG + "gi_minor = 8192\n", "gi_minor: 8192 is not from -1 to 8191"),
    "unknown key": (MIG + "slices = 1\n", "slices: unknown key"),
}


@pytest.mark.parametrize(("text", "words"), MIG_FAULTS.values(), ids=MIG_FAULTS)
def test_mig_fault(text: str, words: str) -> None:
    (fault,) = faults(NODE + GPU + text)
    assert fault.startswith(f"gpu[0].mig[0].{words}")


def part(number: int, **values: object) -> str:
    """One more MIG device; its GPU instance has the number too."""
    said = {
        "uuid": f"MIG-{number:08x}-89ab-5def-8123-456789abcdef",
        "profile": "1g.10gb",
        "gi": number,
        "ci": 0,
        "memory_bytes": 10_200_547_328,
        **values,
    }
    lines = (f"{key} = {value!r}\n" for key, value in said.items() if value is not None)
    return "[[gpu.mig]]\n" + "".join(lines)


ANOTHER = GPU + part(1) + SECOND
CONTRADICTIONS = {
    "nvidia and nvidia_uvm with one major": (
        "[node.majors]\nnvidia = 195\nnvidia_uvm = 195\nnvidia_caps = 195\n",
        [
            "node.majors.nvidia_uvm: 195 already belongs to nvidia",
            "node.majors.nvidia_caps: 195 already belongs to nvidia",
        ],
    ),
    "one capability for two compute instances": (
        GPU + part(1, ci_minor=13) + part(2, ci_minor=13),
        ["gpu[0].mig[1].ci_minor: 13 is already ci_minor of MIG device 0:0"],
    ),
    "one capability for two GPU instances": (
        GPU + part(1, gi_minor=12, ci_minor=13) + part(2, gi_minor=12, ci_minor=14),
        ["gpu[0].mig[1].gi_minor: 12 is already gi_minor of MIG device 0:0"],
    ),
    "one capability for instances of two GPUs": (
        GPU + part(1) + SECOND + part(2, gi_minor=12),
        ["gpu[1].mig[0].gi_minor: 12 is already gi_minor of MIG device 0:0"],
    ),
    "a GPU instance and its compute instance": (
        GPU + part(1, gi_minor=5, ci_minor=5),
        ["gpu[0].mig[0].ci_minor: 5 is already gi_minor of MIG device 0:0"],
    ),
    "two capabilities for one GPU instance": (
        GPU + part(1, profile="1c.3g.40gb") + part(2, gi=1, ci=1, profile="1c.3g.40gb", gi_minor=77),
        ["gpu[0].mig[1].gi_minor: 77, where another part of GPU instance 1 has 12"],
    ),
    "more memory than the GPU has": (
        GPU + part(1, memory_bytes=50 * 10**9) + part(2, memory_bytes=40 * 10**9),
        ["gpu[0].mig[1].memory_bytes: with those before it 90000000000 bytes, and its GPU has 85520809984"],
    ),
    "several whole GPUs of one": (
        GPU + part(0, profile="7g.80gb") + part(1, profile="7g.80gb") + part(2, profile="7g.80gb"),
        ["gpu[0].mig[1].profile: with those before it 14 slices, and no GPU has more than 7"],
    ),
    "more compute slices than the instance has": (
        GPU + part(1, profile="2c.3g.40gb") + part(2, gi=1, ci=1, profile="2c.3g.40gb"),
        ["gpu[0].mig[1].profile: with those before it 4 compute slices, and GPU instance 1 has 3"],
    ),
    "an instance of two sizes": (
        GPU + part(1, profile="1c.3g.40gb") + part(2, gi=1, ci=1, profile="1c.2g.20gb"),
        ["gpu[0].mig[1].profile: 1c.2g.20gb, where another part of GPU instance 1 is 1c.3g.40gb"],
    ),
    "devices are found by what they say": (
        SECOND + part(1, index=4, ci_minor=13) + part(2, index=3, ci_minor=13) + GPU,
        ["gpu[0].mig[0].ci_minor: 13 is already ci_minor of MIG device 1:3"],
    ),
    "one graphics node of two GPUs": (
        GPU
        + "drm = [{ name = 'card0', major = 226, minor = 0 }]\n"
        + SECOND
        + "drm = [{ name = 'card1', major = 226, minor = 1 }, { name = 'card2', major = 226, minor = 0 }]\n",
        ["gpu[1].drm[1].minor: 226:0 already belongs to card0"],
    ),
    "a mesh of more NVLinks than there are": (
        GPU
        + SECOND
        + SECOND.replace("1\n", "2\n").replace("GPU-1", "GPU-2").replace("3c", "3d")
        + LINK
        + "nvlink = 20\n"
        + LINK.replace("b = 1", "b = 2")
        + "nvlink = 17\n"
        + LINK.replace("a = 0\nb = 1", "a = 1\nb = 2")
        + "nvlink = 4\n",
        [
            "link[2].nvlink: GPU 0 has 37 NVLinks, and no GPU has more than 36; "
            "through switches this pair would have 17",
        ],
    ),
    "a link to itself": (GPU + LINK.replace("b = 1", "b = 0"), ["link[0].a: must be less than b: 0, 0"]),
    "a link to a GPU of which nothing is known": (
        GPU + "[[fault]]\nindex = 1\nreason = 'gone'\n" + LINK,
        ["link[0].b: there is no GPU with index 1"],
    ),
    "every kind at once": (
        "[node.majors]\nnvidia = 195\nnvidia_uvm = 195\n"
        + GPU
        + part(1, ci_minor=13)
        + part(2, ci_minor=13)
        + part(3, profile="7g.80gb"),
        [
            "node.majors.nvidia_uvm: 195 already belongs to nvidia",
            "gpu[0].mig[1].ci_minor: 13 is already ci_minor of MIG device 0:0",
            "gpu[0].mig[2].profile: with those before it 9 slices, and no GPU has more than 7",
        ],
    ),
    "beside a fault of its own nothing is made up": (
        GPU.replace("index = 0", "index = 'a'") + part(1, ci_minor=13) + part(2, ci_minor=13),
        ["gpu[0].index: must be a whole number"],
    ),
}


@pytest.mark.parametrize(("text", "expected"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradiction(text: str, expected: list[str]) -> None:
    assert faults(NODE + text) == expected


AGREEING = {
    "parts of one GPU instance share its memory and its capability": GPU
    + part(1, profile="1c.4g.40gb", memory_bytes=60 * 10**9)
    + part(2, gi=1, ci=1, profile="3c.4g.40gb", memory_bytes=60 * 10**9),
    "seven slices": GPU + "".join(part(number) for number in range(7, 14)),
    "minors that nobody knows": GPU + part(1, gi_minor=-1, ci_minor=-1) + part(2, gi_minor=-1, ci_minor=-1),
    "a GPU that shares the host's memory": GPU.replace("85_520_809_984", "0") + part(1) + part(2),
    "switches, one link of which is down": GPU
    + SECOND
    + SECOND.replace("1\n", "2\n").replace("GPU-1", "GPU-2").replace("3c", "3d")
    + SECOND.replace("1\n", "3\n").replace("GPU-1", "GPU-3").replace("3c", "3e")
    + "".join(
        f"[[link]]\na = {a}\nb = {b}\npcie = 'NODE'\nnvlink = {17 if b == 3 else 18}\n"
        for a, b in combinations(range(4), 2)
    ),
}


@pytest.mark.parametrize("text", AGREEING.values(), ids=AGREEING)
def test_what_looks_odd_and_is_not(text: str) -> None:
    assert parse(NODE + text).gpus


def test_faults_have_their_lines() -> None:
    text = (
        NODE + GPU + part(1, ci_minor=13) + SECOND + part(2, ci_minor=13, memory_bytes=-1) + "drm = [{ name = 'x' }]\n"
    )
    with pytest.raises(TopologyError) as caught:
        parse(text)
    lines = text.splitlines()
    found = {fault.key: lines[(fault.line or 0) - 1] for fault in caught.value.faults}
    assert found == {
        "gpu[1].mig[0].memory_bytes": "memory_bytes = -1",
        "gpu[1].mig[0].drm": "drm = [{ name = 'x' }]",
    }
    with pytest.raises(TopologyError) as caught:
        parse(text.replace("= -1", "= 1").replace("drm = [{ name = 'x' }]\n", ""))
    (fault,) = caught.value.faults
    assert (fault.key, lines[(fault.line or 0) - 1]) == ("gpu[1].mig[0].ci_minor", "ci_minor = 13")
    assert str(fault).startswith(f"node.toml:{fault.line}: gpu[1].mig[0].ci_minor: ")


def test_a_mig_device_twice() -> None:
    found = faults(NODE + GPU + MIG + MIG)
    assert [fault.split(":")[0] for fault in found] == ["gpu[0].mig[1].uuid", "gpu[0].mig[1]"]


def test_a_gpu_in_prohibited_mode_is_unavailable_in_a_simulation_too() -> None:
    (gpu,) = parse(NODE + GPU + "compute_mode = 'prohibited'\n").gpus
    assert "nvidia-smi -i 0000:3b:00.0 -c 0" in gpu.unavailable
    (other,) = parse(NODE + GPU + "compute_mode = 'prohibited'\nunavailable = 'lost'\n").gpus
    assert other.unavailable == "lost"


def test_what_may_be_left_out() -> None:
    inventory = parse(NODE + GPU)
    assert inventory == Inventory(taken_at=5.0, gpus=inventory.gpus, simulated=True)
    assert inventory.gpus[0].numa_node is None
    assert not inventory.gpus[0].mig_enabled


def test_gpus_and_links_are_ordered_by_index() -> None:
    inventory = parse(NODE + SECOND + GPU + LINK)
    assert [gpu.index for gpu in inventory.gpus] == [0, 1]
    assert inventory.links == (Link(0, 1, "PIX", 0),)


def test_bus_ids_are_normalised() -> None:
    assert parse(NODE + GPU.replace("0000:3b", "00000000:3B")).gpus[0].pci_bus_id == "0000:3b:00.0"
    assert parse(NODE + GPU.replace("0000:3b", "00010000:3B")).gpus[0].pci_bus_id == "10000:3b:00.0"


def test_numa_nodes_in_order() -> None:
    text = "[[numa]]\nnode = 3\ncpus = '48'\nmemory = false\n[[numa]]\nnode = 1\ncpus = '0-15,32-47'\n"
    assert parse(NODE + text).numa == (NumaNode(1, "0-15,32-47"), NumaNode(3, "48", memory=False))


BRANDS = ", ".join(facts.BRANDS)
FAULTS = {
    "no schema": ("[node]\n", ["schema: missing; a whole number"]),
    "another schema": ("schema = 2\n[node]\n", ["schema: 2 is not from 1 to 1"]),
    "a bool is no number": ("schema = true\n[node]\n", ["schema: must be a whole number"]),
    "no node": ("schema = 1\n", ["node: missing; a table"]),
    "no cpus": (f"{NODE}[[numa]]\nnode = 0\n", ["numa[0].cpus: missing; text"]),
    "odd cpus": (
        f"{NODE}[[numa]]\nnode = 0\ncpus = 'all'\n",
        ["numa[0].cpus: 'all' is not a list of CPUs (\"0-15,32-47\")"],
    ),
    "a numa node twice": (
        f"{NODE}[[numa]]\nnode = 0\ncpus = '0'\n[[numa]]\nnode = 0\ncpus = '1'\n",
        ["numa[1].node: the same as numa[0].node"],
    ),
    "node is no table": ("schema = 1\nnode = 3\n", ["node: must be a table"]),
    "unknown key": (
        f"{NODE}divrer = 'x'\n",
        ["node.divrer: unknown key (known here: cuda, driver, extra, majors, modules)"],
    ),
    "unknown table": (
        f"{NODE}[gpus]\n",
        ["gpus: unknown key (known here: change, event, fault, gpu, link, node, numa, schema)"],
    ),
    "not a version": (f"{NODE}driver = '5'\n", ["node.driver: '5' is not a version (580.95.05)"]),
    "gpu is one table": (f"{NODE}[gpu]\n", ["gpu: must be an array of tables"]),
    "gpu is no table": (f"gpu = [1]\n{NODE}", ["gpu[0]: must be a table"]),
    "wrong major": (f"{NODE}[node.majors]\nnvidia = 0\n", ["node.majors.nvidia: 0 is not from 1 to 4095"]),
    "unknown major": (
        f"{NODE}[node.majors]\nuvm = 1\n",
        ["node.majors.uvm: unknown key (known here: modeset, nvidia, nvidia_caps, nvidia_uvm)"],
    ),
    "minor of nvidiactl": (NODE + GPU.replace("minor = 0", "minor = 255"), ["gpu[0].minor: 255 is not from 0 to 247"]),
    "memory as text": (NODE + GPU.replace("85_520_809_984", "'80Gi'"), ["gpu[0].memory_bytes: must be a whole number"]),
    "arch as a number": (NODE + GPU.replace('"9.0"', "9.0"), ["gpu[0].arch: must be text"]),
    "arch": (NODE + GPU.replace('"9.0"', '"9"'), ["""gpu[0].arch: '9' is not a compute capability ("9.0")"""]),
    "a brand of its own": (
        NODE + GPU + "brand = 'acme'\n",
        [f"gpu[0].brand: 'acme' is not a brand that NVML knows ({BRANDS})"],
    ),
    "a compute mode of its own": (
        NODE + GPU + "compute_mode = 'off'\n",
        ["gpu[0].compute_mode: 'off' is none of default, exclusive-thread, prohibited, exclusive-process"],
    ),
    "no architecture of NVIDIA's": (
        NODE + GPU + "architecture = 'rdna'\n",
        [f"gpu[0].architecture: 'rdna' is none of {', '.join(ARCHITECTURES.values())}"],
    ),
    "an odd list of cpus": (
        NODE + GPU + "cpus = '0..3'\n",
        ["gpu[0].cpus: '0..3' is not a list of CPUs (\"0-15,32-47\")"],
    ),
    "a state that will come and none that is": (
        NODE + GPU + "ecc_pending = true\n",
        ["gpu[0].ecc_pending: needs `ecc`, which is missing"],
    ),
    "a fabric without a state": (NODE + GPU + "fabric = { clique = 1 }\n", ["gpu[0].fabric.state: missing; text"]),
    "a fabric's cluster": (
        NODE + GPU + "fabric = { state = 'completed', cluster = '1' }\n",
        ["gpu[0].fabric.cluster: '1' is not a cluster UUID (xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, lower case hex)"],
    ),
    "a module that is none": (
        f"{NODE}[node.modules]\next4 = '1'\n",
        [f"node.modules.ext4: unknown key (known here: {', '.join(sorted(MODULES))})"],
    ),
    "mig as a number": (NODE + GPU + "mig = 1\n", ["gpu[0].mig: must be true or false"]),
    "duplicates": (
        NODE + GPU + GPU,
        [f"gpu[1].{key}: the same as gpu[0].{key}" for key in ("index", "minor", "uuid", "bus_id")],
    ),
    "a link to nowhere": (NODE + GPU + LINK, ["link[0].b: there is no GPU with index 1"]),
    "a link backwards": (
        NODE + GPU + SECOND + LINK.replace("a = 0\nb = 1", "a = 1\nb = 0"),
        ["link[0].a: must be less than b: 1, 0"],
    ),
    "a link twice": (NODE + GPU + SECOND + LINK + LINK, ["link[1]: the same as link[0]"]),
    "a word of its own": (
        NODE + GPU + SECOND + LINK.replace("PIX", "X"),
        ["link[0].pcie: 'X' is none of PIX, PXB, PHB, NODE, SYS"],
    ),
}


@pytest.mark.parametrize(("text", "expected"), FAULTS.values(), ids=FAULTS)
def test_fault(text: str, expected: list[str]) -> None:
    assert faults(text) == expected


@pytest.mark.parametrize("uuid", ["", "GPU-", "MIG-01234567-89ab-cdef-0123-456789abcdef", "GPU-../../etc", "gpu-0"])
def test_uuids_have_a_grammar(uuid: str) -> None:
    (fault,) = faults(NODE + GPU.replace("GPU-01234567-89ab-cdef-0123-456789abcdef", uuid))
    assert fault.startswith("gpu[0].uuid: ")


def test_all_faults_at_once() -> None:
    text = "schema = 3\ncolour = 1\n[node]\ncuda = 13.0\n" + GPU.replace("index = 0\n", "") + "numa = -1\n"
    assert [fault.split(":")[0] for fault in faults(text)] == [
        "schema",
        "node.cuda",
        "gpu[0].index",
        "gpu[0].numa",
        "colour",
    ]


def test_syntax_faults_have_their_line() -> None:
    with pytest.raises(TopologyError) as caught:
        parse("schema = 1\n[node\n")
    assert caught.value.faults[0].line == 2
    assert str(caught.value).startswith("node.toml:2: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"absent\.toml: No such file"):
        load_topology(tmp_path / "absent.toml")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyError, match="UTF-8"):
        load_topology(path)


DRM_FAULTS = {
    "name": ('[{ name = "card0-DP-1", major = 226, minor = 0 }]', "gpu[0].drm[0].name"),
    "twice": (
        '[{ name = "card0", major = 226, minor = 0 }, { name = "card0", major = 226, minor = 1 }]',
        "gpu[0].drm[1].name",
    ),
    "no number": ('[{ name = "card0", major = 226 }]', "gpu[0].drm[0].minor"),
    "no table": ('["card0"]', "gpu[0].drm[0]"),
    "more": ('[{ name = "card0", major = 226, minor = 0, mode = 1 }]', "gpu[0].drm[0].mode"),
}


@pytest.mark.parametrize(("drm", "key"), DRM_FAULTS.values(), ids=DRM_FAULTS)
def test_graphics_nodes_are_checked_like_the_rest(tmp_path: Path, drm: str, key: str) -> None:
    text = (ROOT / "tests/fixtures/gpus/mig.toml").read_text()
    path = tmp_path / "node.toml"
    path.write_text(text.replace("[[gpu]]\n", f"[[gpu]]\ndrm = {drm}\n", 1))
    with pytest.raises(TopologyError) as caught:
        load_topology(path)
    assert [fault.key for fault in caught.value.faults] == [key]
