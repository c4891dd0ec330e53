"""What a topology file plays: each change at its time; a change that is wrong is refused with its place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from nri_gpu.domain.health import ScriptedEvent, Sign
from nri_gpu.domain.node import Inventory, Majors
from nri_gpu.inventory.changes import changes
from nri_gpu.inventory.inventory_controller import InventoryCache
from nri_gpu.inventory.scenario import LOST, Scenario
from nri_gpu.inventory.topology_file import parse_scenario
from nri_gpu.inventory.topology_source import TopologySource
from tests.support.daemon import TOPOLOGIES
from tests.unit.inventory.files import GPU, LINK, MIG, NODE, PLAYED, SECOND, faults, parse


def scenario(text: str = PLAYED) -> Scenario:
    return parse_scenario(text, "node.toml", 5.0)


def test_the_beginning_is_the_file_without_changes() -> None:
    assert scenario().after(0) == parse(PLAYED) == parse(PLAYED[: PLAYED.index("[[change]]")])


def test_a_lost_gpu_shows_it_as_nvml_would() -> None:
    played = [scenario().after(at).gpus[1] for at in (3.4, 3.5, 8.9, 9.0)]
    assert [(gpu.unavailable, gpu.signs) for gpu in played] == [("", ()), *[(LOST, (Sign.LOST,))] * 2, ("", ())]
    hot = f"{NODE}{GPU}signs = ['thermal']\n[[change]]\nat_s = 1\ngpu = 0\n"
    assert scenario(f"{hot}lost = true\n").after(1).gpus[0].signs == (Sign.LOST, Sign.THERMAL)
    assert scenario(f"{hot}signs = []\n").after(1).gpus[0].signs == ()
    assert scenario(f"{hot}signs = 'power-brake, thermal'\n").after(1).gpus[0].signs == (Sign.POWER_BRAKE, Sign.THERMAL)


def test_a_gpu_is_not_there_from_the_beginning_and_is_plugged_in() -> None:
    leaves = "[[change]]\nat_s = 0\ngpu = 0\npresent = false\n"
    comes = "[[change]]\nat_s = 5\ngpu = 0\npresent = true\nsigns = ['remap-pending']\n"
    played = scenario(f"{NODE}{GPU}{SECOND}{LINK}{leaves}{comes}")
    assert [[gpu.index for gpu in played.after(at).gpus] for at in (0, 5)] == [[1], [0, 1]]
    assert [len(played.after(at).links) for at in (0, 5)] == [0, 1]
    assert played.after(5).gpus[0].signs == (Sign.REMAP_PENDING,)


def test_a_recovery_action_comes_with_its_sign_and_goes() -> None:
    """As NVML shows them; and a remap that was pending is done."""
    text = f"{NODE}{GPU}recovery_action = 'none'\nsigns = ['remap-pending']\n"
    for at_s, line in ((1, "recovery_action = 'gpu-reset'"), (2, "signs = []\nrecovery_action = 'none'")):
        text += f"[[change]]\nat_s = {at_s}\ngpu = 0\n{line}\n"
    seen = [scenario(text).after(at_s).gpus[0] for at_s in range(3)]
    assert [gpu.recovery_action for gpu in seen] == ["none", "gpu-reset", "none"]
    assert [gpu.signs for gpu in seen] == [("remap-pending",), ("remap-pending", "reset-required"), ()]
    assert seen[2].remap_pending is False


def test_modules_change_with_a_driver() -> None:
    text = f"{NODE}[node.majors]\nnvidia = 195\nnvidia_uvm = 508\n[[change]]\nat_s = 1\ndriver = '590.10'\n"
    assert scenario(f"{text}majors = {{ nvidia = 195, nvidia_caps = 9 }}\n").after(1).majors == Majors(195, None, 9)
    assert scenario(text).after(1).majors == Majors(195, 508)
    assert scenario(f"{text}majors = {{}}\n").after(1).majors == Majors()


def test_the_order_in_the_file_does_not_matter() -> None:
    assert [change.at_s for change in scenario().changes] == [1, 3.5, 9, 20, 30, 40, 50]


def test_a_layout_may_keep_a_device_of_the_one_before() -> None:
    again = MIG.replace("gpu.mig", "change.mig")
    text = f"{NODE}{GPU}{MIG}[[change]]\nat_s = 1\ngpu = 0\n{again}[[change]]\nat_s = 2\ngpu = 0\n{again}"
    assert scenario(text).after(1).parts == scenario(text).after(0).parts


def test_the_source_sees_an_edit_and_the_time(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(PLAYED)
    now = 100.0
    source = TopologySource(file, clock=lambda: now)
    assert asyncio.run(source.refresh()).gpus[1].unavailable == ""
    before = source.kernel_view()
    assert source.kernel_view() == before
    now = 103.5
    assert (at_time := source.kernel_view()) != before
    assert asyncio.run(source.refresh()).gpus[1].unavailable == LOST
    os.utime(file, ns=(1, 1))
    assert (edited := source.kernel_view()) != at_time
    file.unlink()
    assert source.kernel_view() != edited


def test_the_troubled_node_has_the_troubles_that_it_says() -> None:
    now, said, seen = 0.0, list[str](), list[Inventory]()
    source = TopologySource(TOPOLOGIES / "troubled-node.toml", clock=lambda: now)

    def publish(inventory: Inventory) -> None:
        said.extend(f"{now:02.0f} {each.what}" for each in (changes(seen[-1], inventory) if seen else ()))
        seen.append(inventory)

    cache = InventoryCache(source, publish, lambda fault: said.append(f"{now:02.0f} {fault}"))
    for second in range(31):
        now = float(second)
        asyncio.run(cache.refresh())
    gpu = [f"GPU {at} (GPU-{at}bad0080-0000-4000-8000-00000000000{at})" for at in range(4)]
    assert said == [
        f"03 {gpu[0]} shows thermal",
        f"05 {gpu[1]} shows lost",
        f"05 {gpu[1]} is unavailable: {LOST}",
        f"08 {gpu[0]} no longer shows thermal",
        f"11 {gpu[1]} no longer shows lost",
        f"11 {gpu[1]} is available again",
        f"13 {gpu[2]} is in MIG mode",
        "13 MIG device 2:0 3g.40gb (MIG-20bad080-0000-5000-8000-010000000000) of GPU 2 is new",
        "13 MIG device 2:1 1g.10gb (MIG-21bad080-0000-5000-8000-090000000000) of GPU 2 is new",
        *(f"{second} nvmlInit: Driver Not Loaded (9)" for second in (17, 18, 19)),
        "20 driver 580.95.05 -> 590.10",
        "20 CUDA 13.0 -> 13.1",
        "20 kernel module nvidia-uvm has major 1520, and had 1510",
        "20 kernel module nvidia-caps has major 1521, and had 1511",
        "23 MIG device 2:0 3g.40gb (MIG-20bad080-0000-5000-8000-010000000000) of GPU 2 is gone",
        "23 MIG device 2:1 1g.10gb (MIG-21bad080-0000-5000-8000-090000000000) of GPU 2 is gone",
        f"23 {gpu[2]} is no longer in MIG mode",
        "25 links changed",
        f"25 {gpu[3]} is gone",
        "28 links changed",
        f"28 {gpu[3]} is new",
    ]


def test_the_example_of_the_docs_plays() -> None:
    text = (TOPOLOGIES.parents[1] / "docs/inventory.md").read_text().partition("### Seeing it")[0]
    example = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    ") or not line)
    played = scenario(NODE + GPU + SECOND + example[example.index("[[change]]") :])
    assert [change.at_s for change in played.changes] == [3.5, 6, 8, 10, 20, 25]
    assert played.after(25).driver_version == "590.10"
    assert played.inventory.script == (ScriptedEvent(30, 0, 63),)


def changed(at_s: float, gpu: int, *parts: str) -> str:
    return f"[[change]]\nat_s = {at_s}\ngpu = {gpu}\n" + "".join(parts).replace("gpu.mig", "change.mig")


NODE_AT_1 = "[[change]]\nat_s = 1\n"
AT_1 = NODE_AT_1 + "gpu = 0\n"
# How a fault begins, and what follows the node and its first GPU.
CHANGES: dict[str, str] = {
    "change[0].at_s: missing; a number from 0 to 31536000": "[[change]]\ngpu = 0\nlost = true\n",
    "change[0].gpu: there is no GPU with index 7": changed(1, 7) + "lost = true\n",
    "change[0]: changes nothing: lost, unavailable, signs, reco": AT_1,
    "change[0]: changes nothing: driver, cuda, majors, fault": NODE_AT_1,
    "change[0].lost: says the same as": AT_1 + "lost = true\nunavailable = 'x'\n",
    "change[0].driver: 'new' is not a version": NODE_AT_1 + "driver = 'new'\n",
    "change[0].lost: needs `gpu`, which is missing": NODE_AT_1 + "lost = true\n",
    "change[0].majors: is of the node, not of a GPU": AT_1 + "lost = true\nmajors = {}\n",
    "change[0].present: a GPU that leaves changes in no other way at that time": AT_1
    + "present = false\nlost = true\n",
    "change[0].mig[1].uuid: the same as change[0].mig[0].uuid": changed(1, 0, MIG, MIG),
    "change[0].mig: from then on: MIG-01234567-89ab-5def-8123-456789abcdef is already the UUID of MIG device 0:0": MIG
    + SECOND
    + changed(1, 1, MIG),
    "change[1].mig: ": SECOND + changed(1, 0, MIG) + changed(2, 1, MIG),
    # In the order of their times, and not of the file; and while nobody can be asked.
    "change[0].mig: ": SECOND + changed(5, 1, MIG) + changed(2, 0, MIG),
    "change[2].mig: ": SECOND + NODE_AT_1 + "fault = 'gone'\n" + changed(2, 0, MIG) + changed(3, 1, MIG),
}


@pytest.mark.parametrize(("words", "text"), CHANGES.items(), ids=CHANGES)
def test_wrong_change(words: str, text: str) -> None:
    assert faults(NODE + GPU + text)[0].startswith(words)


def test_a_device_may_move_once_it_is_free() -> None:
    text = NODE + GPU + SECOND + changed(2, 0, MIG) + changed(3, 0) + "mig = false\n" + changed(5, 1, MIG)
    assert scenario(text).after(5).parts[0].gpu.index == 1
