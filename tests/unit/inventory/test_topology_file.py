"""Topology files: what is shipped, what each table means, and every wrong value at once."""

from __future__ import annotations

import asyncio
from itertools import combinations
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.domain.edits import Channels, DeviceNode, Extra, Mount, NodeExtra
from nri_gpu.domain.gpu import MigEngines
from nri_gpu.domain.health import EventType, ScriptedEvent, Sign
from nri_gpu.domain.node import Inventory, Link, Majors, NumaNode
from nri_gpu.inventory.topology_file import TopologyError, former_tables, load_topology
from nri_gpu.inventory.topology_source import TopologySource
from tests.support.log import Log
from tests.unit.inventory.files import FORMER, GPU, LINK, MIG, NODE, SECOND, faults, parse, part

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "config/topologies").glob("*.toml"))
FIXTURES = sorted((ROOT / "tests/fixtures/gpus").glob("*.toml"))


@pytest.mark.parametrize("path", [*SHIPPED, *FIXTURES], ids=lambda path: path.stem)
def test_every_file_parses(path: Path) -> None:
    inventory = load_topology(path, boot_clock=lambda: 7.0)
    assert (inventory.simulated, inventory.taken_at, inventory.fault) == (True, 7.0, "")
    assert [gpu.index for gpu in inventory.gpus] == list(range(len(inventory.gpus)))
    uuids = [unit.uuid for unit in inventory.units]
    assert len({uuid[:6] for uuid in uuids}) == len(uuids)  # people write them as prefixes


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_list_every_pair_and_majors_that_no_driver_has(path: Path) -> None:
    inventory = load_topology(path)
    assert [(link.a, link.b) for link in inventory.links] == list(combinations(range(len(inventory.gpus)), 2))
    majors = inventory.majors
    assert majors.nvidia in (None, 195)
    assert all(major is None or major > 511 for major in (majors.nvidia_uvm, majors.nvidia_caps))


def test_what_may_be_left_out() -> None:
    inventory = parse(NODE + GPU)
    assert inventory == Inventory(taken_at=5.0, gpus=inventory.gpus, simulated=True)
    assert inventory.gpus[0].numa_node is None
    assert not inventory.gpus[0].mig_enabled


@pytest.mark.parametrize("memory", ["", "memory_bytes = 0\n"])
def test_memory_that_is_left_out_or_zero_is_unknown(memory: str) -> None:
    bare = "".join(line for line in GPU.splitlines(True) if not line.startswith(("memory_bytes", "arch"))) + memory
    (gpu,) = parse(NODE + bare + MIG.replace("memory_bytes = 10_200_547_328\n", memory)).gpus
    assert (gpu.memory_bytes, gpu.arch, gpu.mig[0].memory_bytes) == (None, None, None)
    assert (gpu.mig[0].engines, gpu.mig[0].profile) == (MigEngines(), "1g.10gb")


def test_tables_are_ordered_by_index() -> None:
    text = "[[numa]]\nnode = 3\ncpus = '48'\nmemory = false\n[[numa]]\nnode = 1\ncpus = '0-15,32-47'\n"
    inventory = parse(NODE + SECOND + GPU + LINK + text)
    assert [gpu.index for gpu in inventory.gpus] == [0, 1]
    assert inventory.links == (Link(0, 1, "PIX", 0),)
    assert inventory.numa == (NumaNode(1, "0-15,32-47"), NumaNode(3, "48", memory=False))


def test_bus_ids_are_normalised() -> None:
    assert parse(NODE + GPU.replace("0000:3b", "00000000:3B")).gpus[0].pci_bus_id == "0000:3b:00.0"
    assert parse(NODE + GPU.replace("0000:3b", "00010000:3B")).gpus[0].pci_bus_id == "10000:3b:00.0"


@pytest.mark.parametrize(
    ("minor", "said", "minors"),
    [
        (0, "", (84, 85)),  # as drivers number them, by the GPU's minor: 3 + 135 * 0 + 9 * 9
        (2, "", (354, 355)),
        (40, "", (None, None)),  # drivers have none for so many GPUs
        (0, "gi_minor = 7\nci_minor = 8\n", (7, 8)),
        (0, "gi_minor = -1\n", (None, 85)),
    ],
)
def test_capability_minors_are_those_given_or_as_drivers_number_them(
    minor: int, said: str, minors: tuple[int | None, int | None]
) -> None:
    (gpu,) = parse(NODE + GPU.replace("minor = 0", f"minor = {minor}") + MIG + said).gpus
    assert gpu.mig_enabled
    (device,) = gpu.mig
    assert (device.index, device.profile) == (0, "1g.10gb")
    assert (device.gpu_instance_minor, device.compute_instance_minor) == minors


def test_mig_devices_have_the_index_they_say() -> None:
    assert [device.index for device in parse(f"{NODE}{GPU}{MIG}index = 4\n{part(1)}").gpus[0].mig] == [1, 4]


def test_processes_do_not_make_two_nodes_differ() -> None:
    busy = parse(NODE + GPU + "processes = 2\n")
    assert busy.gpus[0].processes == 2
    assert busy == parse(NODE + GPU)


def test_a_gpu_in_prohibited_mode_is_unavailable_in_a_simulation_too() -> None:
    (gpu,) = parse(NODE + GPU + "compute_mode = 'prohibited'\n").gpus
    assert "nvidia-smi -i 0000:3b:00.0 -c 0" in gpu.unavailable
    (other,) = parse(NODE + GPU + "compute_mode = 'prohibited'\nunavailable = 'lost'\n").gpus
    assert other.unavailable == "lost"


@pytest.mark.parametrize("text", ['"thermal, remap-pending"', '["thermal", "remap-pending", "thermal"]'])
def test_signs_are_a_list_or_one_text_with_commas(text: str) -> None:
    assert parse(f"{NODE}{GPU}signs = {text}\n").gpus[0].signs == (Sign.THERMAL, Sign.REMAP_PENDING)


def test_a_recovery_action_comes_with_its_sign() -> None:
    """As NVML shows them."""
    node = f"{NODE}{GPU}signs = 'remap-pending{{}}'\nrecovery_action = '{{}}'\n"
    gpus = [parse(node.format(*each)).gpus[0] for each in (("", "gpu-reset"), (", reset-required", "none"))]
    assert [gpu.recovery_action for gpu in gpus] == ["gpu-reset", "none"]
    assert [gpu.signs for gpu in gpus] == [(Sign.REMAP_PENDING, Sign.RESET_REQUIRED), (Sign.REMAP_PENDING,)]


def test_what_an_earlier_version_played_is_ignored_with_one_warning(tmp_path: Path, log: Log) -> None:
    file = tmp_path / "node.toml"
    file.write_text(NODE + GPU + FORMER)
    source = TopologySource(file)
    for _ in range(2):
        assert replace(asyncio.run(source.refresh()), taken_at=5.0) == parse(NODE + GPU)
    (line,) = log.warnings()
    sentence = f"[[change]], line 11 of {file}, is ignored: edit the file to change the node; remove it"
    assert (line.text, line.fields["fault"]) == ("topology file has tables that are ignored", sentence)
    assert [each.meaning for each in former_tables(file)] == [sentence]


def test_the_source_sees_an_edit(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(NODE + GPU)
    source = TopologySource(file)
    assert len(asyncio.run(source.refresh()).gpus) == 1
    assert source.kernel_view() == (before := source.kernel_view())
    file.write_text(NODE + GPU + SECOND)
    assert source.kernel_view() != before
    assert len(asyncio.run(source.refresh()).gpus) == 2
    file.unlink()
    assert source.kernel_view() != before


EVENT = "[[event]]\nat_s = 2\ngpu = 0\nxid = 79\n"


def test_events_in_the_order_of_their_time() -> None:
    script = parse(NODE + GPU + EVENT + EVENT.replace("2", "0.5").replace("79", "63")).script
    assert script == (ScriptedEvent(0.5, 0, 63), ScriptedEvent(2, 0, 79))


@pytest.mark.parametrize("kind", EventType)
def test_each_kind_of_event_by_its_name(kind: EventType) -> None:
    word = (kind.name or "").lower().replace("_", "-")
    xid = "xid = 79\n" if kind is EventType.XID else ""
    (event,) = parse(f'{NODE}{GPU}[[event]]\nat_s = 0.5\ngpu = 0\nkind = "{word}"\n{xid}').script
    assert event == ScriptedEvent(0.5, 0, 79 if xid else 0, kind)


EXTRAS = """
[node.majors]
nvidia = 195
modeset = false

[[node.extra]]
name = "gds"
nodes = [{ path = "/dev/nvidia-fs0", major = 1520, minor = 0, mode = "0600" }]
mounts = [{ destination = "/run/udev", source = "/srv/udev" }]

[[node.extra]]
name = "imex"
major = 1524
channels = 1048576

[[node.extra]]
name = "persistenced"
mounts = [{ destination = "/run/nvidia-persistenced/socket", source = "/srv/socket" }]
"""


def test_extras_are_read_with_nodes_mounts_and_channels() -> None:
    inventory = parse(NODE + EXTRAS)
    socket = Mount(
        "/run/nvidia-persistenced/socket", "/srv/socket", ("rbind", "rprivate", "ro", "nosuid", "nodev", "noexec")
    )
    assert inventory.extras == {
        Extra.GDS: NodeExtra((DeviceNode("/dev/nvidia-fs0", 1520, 0, 0o600),), (Mount("/run/udev", "/srv/udev"),)),
        Extra.IMEX: NodeExtra(channels=Channels(1524, 2**20)),
        Extra.PERSISTENCED: NodeExtra(mounts=(socket,)),
    }
    assert inventory.majors == Majors(nvidia=195, modeset=False)
    assert parse(f'{NODE}[[node.extra]]\nname = "imex"\nlacking = "no"\n').extras[Extra.IMEX].lacking == "no"


NUMA = "[[numa]]\nnode = 0\ncpus = '0'\n"
GDS = '[[node.extra]]\nname = "gds"\nnodes = [{ path = "/dev/nvidia-fs0", major = 1520, minor = 0 }]\n'
DRM = "drm = [{ name = 'card0', major = 226, minor = 0 }]\n"
# How a fault begins, and the whole file; what follows `[node]`; what follows the first GPU.
WRONG_FILE = {
    "schema: missing; 1": "[node]\n",
    "schema: 2 is not 1": "schema = 2\n[node]\n",
    "schema: True is not 1": "schema = true\n[node]\n",
    "node: missing; a table": "schema = 1\n",
    "node: must be a table": "schema = 1\nnode = 3\n",
    "gpu[0]: must be a table": f"gpu = [1]\n{NODE}",
}
WRONG_NODE = {
    "node.divrer: unknown key (known here: cuda, driver, extra, majors,": "divrer = 'x'\n",
    "gpus: unknown key (known here: event, fault, gpu, link, node,": "[gpus]\n",
    "node.driver: '5' is not a version (580.95.05)": "driver = '5'\n",
    "gpu: {} is not an array of tables": "[gpu]\n",
    "node.majors.nvidia: 0 is not a whole number from 1 to 4095": "[node.majors]\nnvidia = 0\n",
    "node.modules: {'ext4': '1'} is not a table with versions of mo": "[node.modules]\next4 = '1'\n",
    "gpu[0].minor: 255 is not a whole number from 0 to 247": GPU.replace("minor = 0", "minor = 255"),
    "gpu[0].memory_bytes: '80Gi' is not a whole num": GPU.replace("85_520_809_984", "'80Gi'"),
    'gpu[0].arch: 9.0 is not a compute capability ("9.0")': GPU.replace('"9.0"', "9.0"),
    "fault[0].reason: missing; text": "[[fault]]\nindex = 0\n",
    'numa[0].cpus: missing; a list of CPUs ("0-15,32-47")': "[[numa]]\nnode = 0\n",
    "numa[1].node: the same as numa[0].node": NUMA + NUMA,
    "node.extra[0].name: 'frob' is not one of gds,": '[[node.extra]]\nname = "frob"\n',
    "node.extra[0].name: 'drm' is not one of gds": '[[node.extra]]\nname = "drm"\n',  # which is made of GPUs
    "node.extra[1].name: the same as node.extra[0].name": GDS + GDS,
    "node.extra[0]: gds has neither nodes nor mounts": '[[node.extra]]\nname = "gds"\n',
    "node.extra[0].nodes[0].path: '/etc/nvidia-fs0' is not below": GDS.replace("/dev/n", "/etc/n"),
    "node.extra[0].nodes[0].path: '/dev/../nvidia-fs0' is no": GDS.replace("/dev/n", "/dev/../n"),
    "node.extra[0].nodes[0].mode: '666' is not a mode": GDS.replace("r = 0", 'r = 0, mode = "666"'),
    "node.extra[0].channels: missing; a whole number": '[[node.extra]]\nname = "imex"\nmajor = 1524\n',
    "node.extra[0].channels: only imex has it": GDS + "channels = 1\n",
    "node.extra[0].mounts[0].source: 'b' is not an absolute path": GDS
    + "mounts = [{ destination = '/a', source = 'b' }]\n",
}
WRONG_GPU = {
    "gpu[0].brand: 'acme' is not one of unknown, quadro, tesla": "brand = 'acme'\n",
    "gpu[0].compute_mode: 'off' is not one of default, ex": "compute_mode = 'off'\n",
    "gpu[0].architecture: 'rdna' is not one of kepler,": "architecture = 'rdna'\n",
    "gpu[0].cpus: '0..3' is not a list of CPUs (\"0-15,32-47\")": "cpus = '0..3'\n",
    "gpu[0].ecc_pending: needs `ecc`, which is missing": "ecc_pending = true\n",
    "gpu[0].fabric.state: missing; one of not-s": "fabric = { clique = 1 }\n",
    "gpu[0].fabric.cluster: '1' is not a": "fabric = { state = 'completed', cluster = '1' }\n",
    "gpu[0].signs: 'sad' is not an array of texts, or one text with commas": "signs = 'sad'\n",
    "gpu[0].signs: [5] is not an array of texts, or one text wit": "signs = [5]\n",
    "gpu[0].mig: 1 is not true or false, or an array of tables": "mig = 1\n",
    "gpu[0].mig[0].profile: '10gb' is not a MIG profile": MIG.replace("1g.10gb", "10gb"),
    "gpu[0].mig[0].uuid: 'GPU-": MIG.replace("MIG-", "GPU-"),
    "gpu[0].mig[0].gi: missing; a whole number from 0 to 14": MIG.replace("gi = 9\n", ""),
    "gpu[0].mig[0].ci: 8 is not a whole number from 0 to 7": MIG.replace("ci = 0", "ci = 8"),
    "gpu[0].mig[0].gi_minor: 8192 is not a whole number": MIG + "gi_minor = 8192\n",
    "gpu[0].mig[1].uuid: the same as gpu[0].mig[0]": part(1) + part(1, gi=2),
    "gpu[0].mig[1].index: the same as mig[0].index": part(1) + part(2, index=0),
    "gpu[0].mig[1]: the same as mig[0]": part(1) + part(2, gi=1),
    "gpu[0].drm[0].name: 'card0-DP-1' is not the name": DRM.replace("card0", "card0-DP-1"),  # a connector
    "gpu[1].drm[0].name: the same as gpu[0].drm[0].name": DRM + SECOND + DRM,
    "fault[0].index: the same as gpu[0].index": "[[fault]]\nindex = 0\nreason = 'gone'\n",
    "link[0].a: must be less than b": SECOND + LINK.replace("a = 0\nb = 1", "a = 1\nb = 0"),
    "link[0].b: there is no GPU with index 1": "[[fault]]\nindex = 1\nreason = 'gone'\n" + LINK,
    "link[1]: the same as link[0]": SECOND + LINK + LINK,
    "link[0].pcie: 'X' is not one of PIX, PXB, PHB, NODE": SECOND + LINK.replace("PIX", "X"),
    "event[0].at_s: -1.5 is not a number from 0": EVENT.replace("= 2", "= -1.5"),
    "event[0].at_s: nan is not a number from 0 to": EVENT.replace("= 2", "= nan"),
    "event[0].gpu: there is no GPU with index 7": EVENT.replace("gpu = 0", "gpu = 7"),
    "event[0].kind: 'flood' is not one of double-bit-ecc, x": EVENT + "kind = 'flood'\n",
    "event[0].xid: only an event of kind xid has": EVENT + "kind = 'poison'\n",
    "event[0].xid: missing; a whole number": EVENT.replace("xid = 79\n", ""),
    "event[0].xid: 0 is not a whole number from 1 to 65535": EVENT.replace("79", "0"),
    "event[0].xid: -1 is not a whole number from 1 to 65535": EVENT.replace("79", "-1"),
    "event[0].xid: 2147483648 is not a whole number from 1 to 65535": EVENT.replace("79", str(2**31)),
}
WRONG = (
    WRONG_FILE
    | {words: NODE + text for words, text in WRONG_NODE.items()}
    | {words: NODE + GPU + text for words, text in WRONG_GPU.items()}
)


@pytest.mark.parametrize(("expected", "text"), WRONG.items(), ids=WRONG)
def test_a_wrong_value_is_one_fault(expected: str, text: str) -> None:
    (fault,) = faults(text)
    assert fault.startswith(expected)


@pytest.mark.parametrize("uuid", ["", "GPU-", "MIG-01234567-89ab-cdef-0123-456789abcdef", "GPU-../../etc", "gpu-0"])
def test_uuids_have_a_form(uuid: str) -> None:
    (fault,) = faults(NODE + GPU.replace("GPU-01234567-89ab-cdef-0123-456789abcdef", uuid))
    assert fault.startswith("gpu[0].uuid: ")


def test_all_wrong_values_at_once() -> None:
    text = "schema = 3\ncolour = 1\n[node]\ncuda = 13.0\n" + GPU.replace("index = 0\n", "") + "numa = -1\n" + GPU
    assert [fault.split(":")[0] for fault in faults(text)] == [
        "schema",
        "node.cuda",
        "gpu[0].index",
        "gpu[0].numa",
        "gpu[1].minor",
        "gpu[1].uuid",
        "gpu[1].bus_id",
        "colour",
    ]


def test_values_that_cannot_be_true_together_are_taken() -> None:
    """All but duplicates and dead references: a majors' table with one number twice, and 14 slices of a GPU."""
    majors = "[node.majors]\nnvidia = 195\nnvidia_uvm = 195\n"
    parts = part(1, profile="7g.80gb", ci_minor=13) + part(2, profile="7g.80gb", ci_minor=13)
    assert len(parse(NODE + majors + GPU + parts).parts) == 2


def test_faults_have_their_lines() -> None:
    text = NODE + GPU + LINK + SECOND.replace("minor = 1", "minor = -1")
    lines = text.splitlines()
    for wrong, key, line in ((text, "gpu[1].minor", "minor = -1"), (NODE + GPU + LINK, "link[0].b", "b = 1")):
        with pytest.raises(TopologyError) as caught:
            parse(wrong)
        (fault,) = caught.value.faults
        assert (fault.key, lines[(fault.line or 0) - 1]) == (key, line)
        assert str(fault).startswith(f"node.toml:{fault.line}: {fault.key}: ")


def test_syntax_faults_have_their_line() -> None:
    with pytest.raises(TopologyError, match=r"^node\.toml:2: "):
        parse("schema = 1\n[node\n")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"absent\.toml: no such file"):
        load_topology(tmp_path / "absent.toml")
    (tmp_path / "node.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyError, match="UTF-8"):
        load_topology(tmp_path / "node.toml")
