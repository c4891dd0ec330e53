"""Root takes a GPU out of use and back: what it is told, what is kept, and what ends it by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.cordon.cordon_controller import BAD_TEXT, CordonController, command
from nri_gpu.cordon.cordon_file import FILE, CordonRecord, read_cordons
from nri_gpu.decision.refusals import CORDONED, CORDONS_UNKNOWN, why_not
from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.gpu import Gpu, GpuUuid
from nri_gpu.domain.health import RecoveryAction
from nri_gpu.ledger.events import Created, Gone, PodGone, Removed
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.reservations import reservation_id
from nri_gpu.system.state import Changed, NodeState
from tests.support.builders import container, entry, gpu, grant, inventory, ledger, mig_gpu, mig_uuid, pod, uuid
from tests.support.ledgers import after
from tests.support.log import Log
from tests.support.running import running
from tests.support.scripted_runtime import until

DEVICE = AllocatedDevice("nvidia.com/gpu", uuid(0))


class Daemon:
    """What the controller needs, over boots and restarts."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder
        self.module, self.boot = "load-1", "boot-1"
        self.now = 0.0
        self.told: list[tuple[str, str, str]] = []
        self.start(Ledger())

    def start(self, recalled: Ledger, *gpus: Gpu) -> None:
        self.state = NodeState(inventory(), later=lambda action: action())
        self.state.ledger = recalled
        self.controller = CordonController(
            self.folder,
            self.state,
            told=self.tell,
            module_load=lambda: self.module,
            boot=lambda: self.boot,
            wall=lambda: 1000.0 + self.now,
            monotonic=lambda: self.now,
            tick_s=0.02,
        )
        self.controller.begin()
        self.state.then(self.controller.follow_ledger, Changed.LEDGER)
        self.put(*(gpus or (gpu(0), gpu(1))))

    def put(self, *gpus: Gpu) -> None:
        self.state.put_inventory(inventory(gpus))
        self.controller.looked(self.state.node.inventory, self.now)

    def tell(self, gpu_uuid: GpuUuid, record: CordonRecord, ended: str) -> None:
        self.told.append((gpu_uuid, record.why, ended))

    def why(self) -> list[str]:
        return [why_not(unit) for unit in self.state.node.inventory.units]

    async def cordon(self, word: str = "0", why: str = "fan broken", *, until_reset: bool = False) -> str:
        outcome = await self.controller.cordon(command(word, why, "alice", until_reset=until_reset))
        return outcome.fault


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


async def test_a_gpu_goes_out_of_use_and_back_and_who_and_why_is_told(daemon: Daemon, tmp_path: Path) -> None:
    assert await daemon.cordon(uuid(0)) == ""
    assert daemon.why() == [CORDONED, ""]
    record = read_cordons(tmp_path)[uuid(0)]
    assert (record.by, record.why, record.at_s, record.reset) == ("alice", "fan broken", 1000.0, None)
    outcome = await daemon.controller.uncordon("0 bob")
    assert (outcome.gpu_uuid, outcome.fault, outcome.withheld) == (uuid(0), "", "")
    assert daemon.why() == ["", ""]
    assert read_cordons(tmp_path) == {}
    assert daemon.told == [(uuid(0), "fan broken", ""), (uuid(0), "fan broken", "by bob")]


@pytest.mark.parametrize("word", ["0", uuid(0), "0000:10:00.0", "00000000:10:00.0"])
async def test_it_is_named_by_index_uuid_or_address(daemon: Daemon, word: str) -> None:
    assert await daemon.cordon(word) == ""
    assert daemon.why() == [CORDONED, ""]


async def test_bad_commands_change_nothing(daemon: Daemon, tmp_path: Path) -> None:
    assert "no GPU 7" in await daemon.cordon("7")
    assert await daemon.cordon() == ""
    assert await daemon.cordon(why="again") == "it is out of use already, by alice: fan broken"
    for line in (
        "0",
        "0 until-root alice",
        "0 forever alice why",
        f"0 until-root alice {'x' * 201}",
        "0 until-root a \x1b",
    ):
        assert (await daemon.controller.cordon(line)).fault == BAD_TEXT
    assert "no GPU 9" in (await daemon.controller.uncordon("9")).fault
    assert "not taken out of use" in (await daemon.controller.uncordon("1")).fault
    assert read_cordons(tmp_path)[uuid(0)].why == "fan broken"


async def test_what_is_kept_nowhere_is_not_done(tmp_path: Path) -> None:
    daemon = Daemon("nothing is kept on this node")
    assert await daemon.cordon() == (await daemon.controller.uncordon("0")).fault == "nothing is kept on this node"
    daemon = Daemon(tmp_path / "gone")
    assert "cannot be written: no such file" in await daemon.cordon()
    assert daemon.why() == ["", ""]
    (tmp_path / "gone").mkdir()
    assert await daemon.cordon() == ""
    (tmp_path / "gone" / FILE).unlink()
    (tmp_path / "gone").rmdir()
    assert "cannot be written" in (await daemon.controller.uncordon("0")).fault
    assert daemon.why() == [CORDONED, ""]
    assert len(daemon.told) == 1


async def test_unhealthy_stays_unhealthy(daemon: Daemon) -> None:
    daemon.put(gpu(0, unavailable="GPU is lost"), gpu(1))
    await daemon.cordon()
    assert daemon.why() == ["GPU is lost", ""]
    assert (await daemon.controller.uncordon("0")).withheld == "GPU is lost"


async def test_it_outlives_a_boot_also_of_a_gpu_that_is_away(daemon: Daemon) -> None:
    await daemon.cordon()
    daemon.boot, daemon.module = "boot-2", "load-2"
    daemon.start(Ledger(), gpu(1))
    assert daemon.why() == [""]
    daemon.put(gpu(0), gpu(1))
    assert daemon.why() == [CORDONED, ""]
    daemon.put(gpu(1))
    assert (await daemon.controller.uncordon(f"{uuid(0)} bob")).fault == ""


async def test_mig_devices_are_out_of_use_too_also_those_made_later(daemon: Daemon) -> None:
    daemon.put(mig_gpu(0), gpu(1))
    assert "no GPU 0:1" in await daemon.cordon("0:1")
    await daemon.cordon()
    assert daemon.why() == [CORDONED, CORDONED, CORDONED, ""]
    daemon.put(mig_gpu(0, ["1g.5gb"] * 3), gpu(1))
    assert daemon.why() == [CORDONED] * 4 + [""]


PROOFS = {
    "another load of the module": ("load-2", "boot-1", gpu(0)),
    "a boot": ("load-1", "boot-2", gpu(0)),
    "the remap is done": ("load-1", "boot-1", gpu(0, remap_pending=False)),
    "the driver wants nothing any more": ("load-1", "boot-1", gpu(0, recovery_action=RecoveryAction.NONE)),
}
BEFORE = gpu(0, remap_pending=True, recovery_action=RecoveryAction.GPU_RESET)


@pytest.mark.parametrize(("module", "boot", "shown"), PROOFS.values(), ids=PROOFS)
async def test_until_a_reset_is_proven(daemon: Daemon, module: str, boot: str, shown: Gpu) -> None:
    daemon.put(BEFORE, gpu(1))
    await daemon.cordon(until_reset=True)
    daemon.put(replace(BEFORE, cordon=None), gpu(1))
    assert daemon.why()[0] == CORDONED
    daemon.module, daemon.boot = module, boot
    daemon.put(shown, gpu(1))
    assert daemon.why() == ["", ""]
    assert daemon.told[-1] == (uuid(0), "fan broken", "its reset is proven")


async def test_quiet_proves_no_reset_and_without_the_word_none_ends_it(daemon: Daemon) -> None:
    shown = gpu(0, recovery_action=RecoveryAction.NONE, remap_pending=False)
    daemon.put(shown, gpu(1))
    await daemon.cordon(until_reset=True)
    await daemon.cordon("1")
    daemon.put(shown, gpu(1))
    assert daemon.why() == [CORDONED, CORDONED]
    assert not daemon.controller.repaired(uuid(1))
    assert not daemon.controller.repaired("")
    assert daemon.controller.repaired(uuid(0))
    daemon.boot = "boot-2"
    daemon.put(shown, gpu(1))
    assert daemon.why() == ["", CORDONED]


async def test_what_was_seen_of_a_reset_outlives_a_restart(daemon: Daemon, tmp_path: Path) -> None:
    async with running(daemon.controller.run()):
        await daemon.cordon(until_reset=True)
        daemon.put(BEFORE, gpu(1))
        await until("the file", lambda: bool((reset := read_cordons(tmp_path)[uuid(0)].reset) and reset.asked))
    daemon.start(Ledger(), gpu(0, recovery_action=RecoveryAction.NONE), gpu(1))
    assert daemon.why() == ["", ""]


def of_kubelet() -> Ledger:
    """A pod's container that runs on what the kubelet allocated to it."""
    of = container(kubelet=Allocated(devices=(DEVICE,)))
    return after(Ledger(), Created(0.0, of, grant(0)))


def kept(daemon: Daemon) -> bool:
    cordon = daemon.state.node.gpus[0].cordon
    return cordon is not None and reservation_id(DEVICE) in cordon.given


async def test_a_device_of_the_kubelet_stays_healthy_until_its_pod_is_gone(daemon: Daemon) -> None:
    daemon.state.commit(of_kubelet())
    await daemon.cordon()
    assert kept(daemon)
    daemon.state.commit(after(daemon.state.ledger, Gone(1.0, (container().id,))))
    assert kept(daemon)
    daemon.state.commit(after(daemon.state.ledger, PodGone(2.0, pod().id)))
    assert not kept(daemon)


async def test_after_a_boot_a_device_waits_for_its_pod(daemon: Daemon, tmp_path: Path) -> None:
    """The ledger is empty then, and the kubelet admits the pod again before anybody tells of it."""
    daemon.state.commit(of_kubelet())
    await daemon.cordon()
    for comes in (True, False):
        daemon.start(Ledger())
        daemon.state.commit(after(Ledger(), Created(0.0, container(of="other"), grant(1, to=container(of="other")))))
        assert kept(daemon)
        if comes:
            daemon.state.commit(of_kubelet())
            daemon.state.commit(after(daemon.state.ledger, Removed(1.0, (container().id,)), PodGone(2.0, pod().id)))
            assert not kept(daemon)
    daemon.now = 901.0
    async with running(daemon.controller.run()):
        daemon.state.commit(ledger(entry(0)))
        await until("its end", lambda: not kept(daemon))
        await until("the file", lambda: reservation_id(DEVICE) not in read_cordons(tmp_path)[uuid(0)].given[uuid(0)])


async def test_a_pod_that_the_ledger_learns_of_has_its_later_containers(daemon: Daemon) -> None:
    await daemon.cordon()
    daemon.state.commit(ledger(entry(0)))
    cordon = daemon.state.node.gpus[0].cordon
    assert cordon is not None
    assert pod().uid in cordon.given


async def test_a_damaged_file_lets_nothing_new_through_and_is_said_once(daemon: Daemon, tmp_path: Path) -> None:
    await daemon.cordon()
    (tmp_path / FILE).write_text("{")
    with Log() as log:
        daemon.start(ledger(entry(1)))
        await daemon.controller.read_again()
    assert daemon.why() == [CORDONS_UNKNOWN, CORDONS_UNKNOWN]
    assert [line.level for line in log.lines] == ["ERROR"]
    given = [gpu.cordon.given for gpu in daemon.state.node.gpus if gpu.cordon]
    assert given == [frozenset(), {pod().uid}]
    assert FILE in daemon.controller.fault
    assert FILE in await daemon.cordon("1")
    daemon.state.commit(ledger(entry(0, 1)))
    assert [bool(gpu.cordon and gpu.cordon.given) for gpu in daemon.state.node.gpus] == [True, True]
    (tmp_path / FILE).unlink()
    await daemon.controller.read_again()
    assert daemon.why() == ["", ""]
    assert daemon.controller.fault == ""
    assert mig_uuid(0) not in daemon.controller.records


async def test_what_could_not_be_written_is_written_later(daemon: Daemon, tmp_path: Path) -> None:
    await daemon.cordon()
    away = tmp_path.with_name("away")
    tmp_path.rename(away)  # noqa: ASYNC240 - at once
    with Log() as log:
        async with running(daemon.controller.run()):
            daemon.state.commit(ledger(entry(0)))
            await until("the warning", lambda: log.lines)
            away.rename(tmp_path)
            daemon.state.commit(Ledger())
            daemon.state.commit(ledger(entry(0, 1)))
            await until("the file", lambda: pod().uid in read_cordons(tmp_path)[uuid(0)].given[uuid(0)])
    assert str(log.lines[0]).startswith("WARNING GPUs out of use not written")
