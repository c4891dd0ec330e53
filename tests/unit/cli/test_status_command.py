"""`nri-gpu status`: what the running daemon answers, as text and as JSON; and how health is shown."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, to_builtins
from msgspec.structs import replace

from nri_gpu.cli.ask_daemon import with_health
from nri_gpu.cli.page import Line, Tone, plain
from nri_gpu.cli.render import Times, duration, health_lines, state_of
from nri_gpu.cli.status_page import SAMPLING, status_page
from nri_gpu.daemon import answers
from nri_gpu.daemon.view import status_of
from nri_gpu.domain.allocation import AllocatedDevice, ResourceStatus
from nri_gpu.domain.container import ContainerId, FirstProcess, PodUid
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.gpu import Cordon, PciBusId
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import Health, HealthNotes, HealthState, History, Sign, Transition, TransitionKind
from nri_gpu.domain.mps import MpsFolders, Seat
from nri_gpu.domain.names import INSTALL, NOT_FOUND, SOUGHT
from nri_gpu.domain.node import GpuFault, Inventory, KernelGpu
from nri_gpu.domain.resource_claim import ClaimedDevice, ClaimUid, PreparedClaim
from nri_gpu.dra.questions import DriverReport
from nri_gpu.health.node_health import NodeHealth
from nri_gpu.ledger.events import DevicesAllocated
from nri_gpu.ledger.holders import Releasing
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.plugin.guard_status import GuardStatus, process_started, write_guard_status
from nri_gpu.plugin.process_looks import Lost
from nri_gpu.policy.health_settings import OtherXids
from nri_gpu.stray.judge import StrayProcess, StrayUse
from nri_gpu.system.child import Unkilled
from nri_gpu.system.liveness import LivenessFile
from tests.support import builders as make
from tests.support.goldens import compare
from tests.support.health import PARTS, RULES, UUIDS, at, look, with_parts, xid
from tests.support.ledgers import after
from tests.support.views import CLOCK, NOW, OTHER, TRAIN, status_json, view
from tests.unit.cli.conftest import FREE, Done, NriGpuCall, daemon
from tests.unit.cli.printed import GOLDENS, LONG_POD, REFUSED, busy_node

CLAIMED = ClaimedDevice(request="gpu", pool="node", device="gpu-7", uuid=make.uuid(0), mode=Mode.SHARED)
TRAINING = PreparedClaim(
    uid=ClaimUid("claim"),
    namespace="ml",
    name="train",
    pods={PodUid("2"): "b", PodUid("1"): "a"},
    devices=(CLAIMED,),
)


@pytest.fixture
def asked(nri_gpu: NriGpuCall, tmp_path: Path) -> NriGpuCall:
    """Asks a daemon that answers this."""

    def ask(answer: Mapping[str, Any] | bytes, *options: str) -> Done:
        with daemon(tmp_path, answer if isinstance(answer, bytes) else json.dumps(answer).encode()) as state:
            return nri_gpu("status", "--state-dir", state, *options)

    return ask


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_a_table_or_the_daemons_json(asked: NriGpuCall) -> None:
    done = asked(FREE)
    first, heads, *gpus = done.out.splitlines()
    assert (done.code, len(gpus)) == (Exit.OK, make.GPUS)
    assert first == "node1: containerd 2.1.9, driver 580.95.05, policy: /etc/nri-gpu/policy.toml"
    assert heads.split() == ["GPU", "MODEL", "MODE", "HELD", "BY", "FOR"]


def test_an_older_daemon_names_no_node(asked: NriGpuCall) -> None:
    node = {key: value for key, value in FREE["node"].items() if key != "name"}
    assert asked({**FREE, "node": node}).out.startswith("containerd 2.1.9, driver ")


def test_json_is_the_daemons_answer(asked: NriGpuCall) -> None:
    done = asked(FREE, "-o", "json")
    assert (done.code, done.document) == (Exit.OK, FREE)


def test_an_older_daemon_answers_less(asked: NriGpuCall) -> None:
    added = ("transitions", "faults", "kubelet", "stray")
    done = asked({key: value for key, value in FREE.items() if key not in added})
    assert (done.code, done.out) == (
        Exit.OK,
        plain(status_page(convert(FREE, answers.DaemonStatus), Times(NOW))) + "\n",
    )


STRAY = StrayUse(
    kind="ungranted-container",
    message="ml/train, container main (pid 7 /bin/train) has /dev/nvidia1 open: delete the pod",
    processes=(StrayProcess(7, 700, "/bin/train"),),
    gpu_uuids=(make.uuid(1),),
    nodes=("/dev/nvidia1",),
    since_s=NOW - 185,
)
STRAY_USE = answers.StrayStatus(True, NOW, "some processes are hidden", (STRAY, replace(STRAY, since_s=None)))


def test_stray_use_is_no_fault_of_the_daemon(asked: NriGpuCall) -> None:
    assert asked(status_json(view(stray=STRAY_USE))).code == Exit.OK


AWAY = status_json(
    view(
        connection=answers.RuntimeConnection(ready=False, since_s=NOW, fault="no NRI socket"),
        policy=answers.PolicyStatus("policy.toml", "line 3"),
    )
)


def test_a_daemon_that_cannot_grant_is_a_finding(asked: NriGpuCall) -> None:
    done = asked(AWAY)
    assert done.code == Exit.FINDING
    assert "not connected to the runtime: no NRI socket" in done.out
    assert "policy not usable: line 3" in done.out


@pytest.mark.parametrize(("options", "code"), [((), Exit.FINDING), (("--probe",), Exit.OK)])
def test_a_rejected_policy_is_a_finding_and_no_reason_to_end_the_pod(
    asked: NriGpuCall, options: tuple[str, ...], code: Exit
) -> None:
    done = asked(status_json(view(policy=answers.PolicyStatus("policy.toml", "", "line 3"))), *options)
    assert done.code == code
    assert "policy file rejected, the previous policy stays in force: line 3" in done.out


@pytest.mark.parametrize(("looked_s", "code"), [(None, Exit.FINDING), (NOW, Exit.OK)])
def test_an_observer_is_ready_once_it_has_looked(asked: NriGpuCall, looked_s: float | None, code: Exit) -> None:
    """Whatever it could not see."""
    observer = answers.ObserverStatus(looked_s=looked_s)
    done = asked(status_json(view(observer=observer, inventory_fault="no NVML")), "--probe")
    assert done.code == code


def test_alive_only_asks_for_an_answer(asked: NriGpuCall, nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    assert asked(AWAY, "--alive") == Done(Exit.OK, "", "")
    assert nri_gpu("status", "--state-dir", tmp_path / "none", "--alive").code == Exit.UNAVAILABLE


@pytest.mark.parametrize("answer", [None, b"", b"nonsense", b"[]", b'{"error": "too many"}'])
def test_no_answer_is_69(asked: NriGpuCall, nri_gpu: NriGpuCall, tmp_path: Path, answer: bytes | None) -> None:
    done = nri_gpu("status", "--state-dir", tmp_path) if answer is None else asked(answer)
    assert done.code == Exit.UNAVAILABLE
    assert f"no answer from the daemon at {tmp_path}/control.sock: " in done.err
    assert "is `nri-gpu run` running?" in done.err


def test_no_permission_is_77(nri_gpu: NriGpuCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("nri_gpu.cli.ask_daemon.ask", refuse)  # the tests may run as root
    done = nri_gpu("status", "--state-dir", tmp_path)
    assert (done.code, "be root, or in the policy's control.group" in done.err) == (Exit.PERMISSION, True)


GUARD = GuardStatus(pid=os.getpid(), started=process_started(os.getpid()))


def test_a_guard_is_ready_when_connected_and_alive_before(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    def ask(*options: str) -> int:
        return nri_gpu("status", "--guard", tmp_path, *options).code

    assert ask() == Exit.UNAVAILABLE
    write_guard_status(tmp_path, GUARD)
    assert ask("--alive") == Exit.UNAVAILABLE
    LivenessFile(tmp_path).write(ready=False)
    assert (ask(), ask("--alive")) == (Exit.FINDING, Exit.OK)
    write_guard_status(tmp_path, replace(GUARD, connected=True))
    assert ask() == Exit.OK
    (tmp_path / "alive").write_text(f"{time.clock_gettime(time.CLOCK_BOOTTIME) - 60:10.0f} ready\n")
    assert ask("--alive") == Exit.UNAVAILABLE


BUSY = json.loads(json.dumps(to_builtins(busy_node())))
UUID = make.uuid(1)
THEIRS = make.pod("theirs", namespace="other")


def test_a_namespace_has_its_gpus_and_nothing_of_others(asked: NriGpuCall) -> None:
    answer = status_json(
        view(
            make.ledger(
                make.entry(0, to=make.container(of=THEIRS)),
                *(make.entry(1, to=each, mode=Mode.SHARED) for each in (TRAIN, make.container(of=THEIRS))),
                others=[make.foreign(2, 3)],
            ),
            refusals=(REFUSED, replace(REFUSED, namespace="other")),
        )
    )
    page = asked(answer, "-n", "ml").out
    assert [line.split()[0] for line in page.splitlines()[2:5]] == ["1", "2", "3"]
    assert "theirs" not in page
    document = asked(answer, "-n", "ml", "-o", "json").document
    assert [gpu["place"] for gpu in document["gpus"]] == ["1", "2", "3"]
    assert [each["pod"] for each in document["gpus"][0]["holders"]] == ["train"]
    assert [each["namespace"] for each in document["refusals"]] == ["ml"]
    assert "no pod of namespace none holds a GPU" in asked(answer, "-n", "none").out


def test_rows_without_heads_have_a_gpu_each_and_faults_go_elsewhere(asked: NriGpuCall) -> None:
    done = asked(BUSY, "--no-headers")
    assert (done.code, done.err) == (Exit.OK, "")
    assert [line.split()[0] for line in done.out.splitlines()] == ["0", "1", "1", "2", "3"]
    away = asked(AWAY, "--no-headers")
    assert (away.code, len(away.out.splitlines())) == (Exit.FINDING, make.GPUS)
    assert "not connected to the runtime: no NRI socket" in away.err
    assert asked(BUSY, "--no-headers", "-n", "none").out == ""


def test_names_are_uuids(asked: NriGpuCall) -> None:
    assert asked(BUSY, "-o", "name", "-n", "ml").out.splitlines() == [make.uuid(at) for at in range(3)]


def test_all_refusals(asked: NriGpuCall) -> None:
    answer = status_json(view(refusals=tuple(replace(REFUSED, number=at, pod=f"p{at}") for at in range(3))))
    said = asked(answer, "--refusals")
    assert (said.code, said.out.count("ml/p")) == (Exit.OK, 3)
    assert "HELD BY" not in said.out
    assert len(asked(answer, "--refusals", "--no-headers").out.splitlines()) == 3
    assert "nothing refused since the daemon started" in asked(FREE, "--refusals").out


EVIL = "\x1b[2Jpod\n0  free"


@pytest.mark.parametrize("options", [(), ("-o", "wide"), ("-o", "name"), ("--no-headers",), ("--refusals",)])
def test_no_name_commands_a_terminal_or_makes_a_line(asked: NriGpuCall, options: tuple[str, ...]) -> None:
    gpu = BUSY["gpus"][0]
    holder = {**gpu["holders"][0], "pod": EVIL, "container": EVIL}
    named = {**gpu, "holders": [holder], "uuid": EVIL, "pci_bus_id": EVIL, "device_node": EVIL, "model": EVIL}
    node = {**BUSY["node"], "name": EVIL, "driver_fault": EVIL}
    refusals = json.loads(json.dumps(to_builtins([replace(REFUSED, pod=EVIL)])))
    done = asked({**BUSY, "gpus": [named], "node": node, "refusals": refusals}, *options)
    assert "\x1b" not in done.out + done.err
    assert "\n0  free" not in done.out + done.err
    assert "?[2Jpod?0  free" in done.out + done.err


def test_wide_has_whole_names_and_absolute_times(asked: NriGpuCall) -> None:
    out = asked(BUSY, "-o", "wide").out
    for word in (LONG_POD, "NVIDIA H100 80GB HBM3", "2027-01-15 06:38:20 UTC", UUID, "0000:11:00.0", "/dev/nvidia6"):
        assert word in out
    assert "123/700 W" in out


# --- what the page says -----------------------------------------------------------------------------------------------


def of_mps(name: str, start: str, phase: GrantPhase = GrantPhase.RUNNING) -> Entry:
    """A container with a seat that this start of its GPU's MPS daemon gave."""
    entry = make.entry(0, to=make.container(of=name), mode=Mode.MPS, phase=phase)
    return replace(entry, grant=replace(entry.grant, seat=Seat(folder=f"/m/{make.uuid(0)}.{start}")))


LOST_GPU = "nvmlDeviceGetName: GPU is lost (15)"
AWAY_GPU = KernelGpu(pci_bus_id=PciBusId("0000:70:00.0"), reason="bound to vfio-pci", model="NVIDIA L4")
RESOURCES = (
    ResourceStatus("nvidia.com/gpu", True, NOW - 200, ""),
    ResourceStatus("nvidia.com/mig-1g.5gb", False, None, "no kubelet listens"),
)
MONITOR = replace(TRAINING, uid=ClaimUid("watch"), name="watch", pods={}, devices=(replace(CLAIMED, admin=True),))
CLAIMS = Ledger(claims={each.uid: each for each in (TRAINING, MONITOR)})
GROUPED = Ledger(claims={TRAINING.uid: replace(TRAINING, groups={"g-1": "gang"})})
REPORT = DriverReport(8, ("DRAConsumableCapacity",))
DRA = answers.DraStatus(enabled=True, driver="gpu.nri.io", asked_s=NOW - 5, silent_s=5.0, report=REPORT)
LOSSY = replace(DRA, report=replace(REPORT, restored=1, unwritten="x cannot be written"))
HUNG = {"inventory_fault": "nvmlInit did not return within 30 s", "inventory_age_s": 185.0}
GONE = Transition(kind=TransitionKind.GPU, what="GPU 3 is gone", uuid=make.uuid(3), index=3)
UNDESCRIBED = (
    Transition(kind=TransitionKind.DESCRIPTION, what="-", index=5),
    Transition(kind=TransitionKind.ANSWER, what="-"),
)
FAULTY = make.node()
FAULTY = replace(
    FAULTY, inventory=replace(FAULTY.inventory, faults=(GpuFault(5, "gone"), GpuFault(6, "nvmlDeviceGetUUID: lost")))
)
NOTES = HealthNotes(
    reset="a reset is due since XID 46, GPU stopped processing",
    soon="it had errors",
    xid="XID 69, graphics engine class error",
    xid_at_s=NOW,
    namespaces=("a", "b", "c"),
)
LEFT = Lost(ContainerId("gone"), "ml/gone", "main", (make.uuid(0),), CLOCK, "/kubepods/gone", (41, 42))
UNSEEN = make.ledger(make.entry(1)).with_processes({ContainerId("train.main"): FirstProcess(43, 1)})
PAGES: dict[str, dict[str, Any]] = {
    "holders": {
        "ledger": make.ledger(
            make.entry(0, to=TRAIN, mode=Mode.SHARED, since=CLOCK - 3700),
            make.entry(0, to=OTHER, mode=Mode.SHARED, since=CLOCK - 5, phase=GrantPhase.CREATED),
            others=[make.foreign(2)],
        )
    },
    "a device that NVIDIA's driver prepared": {
        "ledger": make.ledger(others=[replace(make.foreign(1), device="gpu-6")])
    },
    "GPUs that another component gave beside grants": {
        "ledger": make.ledger(
            make.entry(0, to=TRAIN, since=CLOCK - 60),
            make.entry(1, to=OTHER, since=CLOCK - 60),
            others=[make.foreign(*range(make.GPUS))],
        )
    },
    "a monitor": {"ledger": make.ledger(others=[replace(make.foreign(1), watched=frozenset({make.uuid(1)}))])},
    "a reservation": {
        "ledger": after(Ledger(), DevicesAllocated(CLOCK - 200, (AllocatedDevice("nvidia.com/gpu", make.uuid(0)),)))
    },
    "lost GPUs, held or not": {
        "node": make.node(
            [make.gpu(0, unavailable=LOST_GPU), make.gpu(1), make.gpu(2, unavailable="it fell off the bus")]
        ),
        "ledger": make.ledger(make.entry(0, since=CLOCK - 5), make.entry(1, since=CLOCK - 5, to=OTHER)),
    },
    "a GPU that was just released": {
        "ledger": make.ledger().with_releasing({make.uuid(0): Releasing(PodUid("uid"), "ml/train", CLOCK, 60.0, 1)})
    },
    "a holder of a GPU that is gone": {"ledger": make.ledger(make.entry(3, to=TRAIN)), "node": make.node([])},
    "an MPS daemon that ended below one of three": {
        "ledger": make.ledger(of_mps("old", "a"), of_mps("new", "b"), of_mps("created", "a", GrantPhase.CREATED)),
        "node": replace(make.node(), mps=MpsFolders("/m", "b")),
    },
    "NVML hangs": HUNG,
    "NVML has not answered yet": HUNG | {"inventory_confirmed": False},
    "NVML has never answered": {"inventory_fault": "no driver", "inventory_age_s": None},
    "a GPU that only the kernel knows": {"node": make.node(unlisted=(AWAY_GPU,))},
    "only the kernel knows of GPUs": {
        "node": make.node([], fault="no driver", unlisted=(replace(AWAY_GPU, reason="no driver"),))
    },
    "the kubelet's resources": {"kubelet": answers.KubeletStatus(True, RESOURCES)},
    "the kubelet's resources, and the guard alone": {"kubelet": answers.KubeletStatus(True, RESOURCES, "NRI 0.6")},
    "the driver process and claims": {"ledger": CLAIMS, "dra": DRA},
    "the claim of a PodGroup": {"ledger": GROUPED, "dra": DRA},
    "specifications that something removes": {"ledger": CLAIMS, "dra": LOSSY},
    "a driver process that does not ask": {"dra": replace(DRA, silent_s=90.0)},
    "changes": {"history": History(began_s=NOW - 60).having([GONE] * 11, NOW)},
    "since when GPUs cannot be described": {
        "node": FAULTY,
        "history": History().having(UNDESCRIBED, NOW),
        "inventory_fault": "NVML hangs",
    },
    "what is known beside a GPU's health": {"notes": {make.uuid(1): NOTES}},
    "a process that cannot be killed": {"unkilled": (Unkilled("nvidia-smi", UUIDS[1], 4711, NOW - 90.0),)},
    "a lost container, and a cgroup that is not seen": {"ledger": UNSEEN, "lost": (LEFT,)},
    "stray use": {"stray": STRAY_USE},
}


def test_pages() -> None:
    pages = {name: plain(status_page(status_of(view(**fields)), Times(NOW))) for name, fields in PAGES.items()}
    compare(GOLDENS / "status-pages.txt", "".join(f"== {name}\n{page}\n" for name, page in pages.items()))


def refused(*ages_s: float, first: int = 1) -> list[str]:
    """What is said of refusals so long ago."""
    refusals = tuple(replace(REFUSED, number=first + at, at_s=NOW - age_s) for at, age_s in enumerate(ages_s))
    said = plain(status_page(status_of(view(refusals=refusals)), Times(NOW))).splitlines()
    return [line for line in said if "refused" in line]


def test_refusals_of_the_last_hour_are_counted_and_the_last_is_told() -> None:
    what = (
        "  ml/greedy, container main: container refused [gpu-busy]: asked for 2, and 1 is free: wait until ml/alone is"
    )
    assert refused() == refused(3601.0) == []
    (one, told) = refused(90.0)
    assert one == "1 refused in the last hour, 1m30s ago (all: --refusals):"
    assert told.startswith(what)
    assert refused(4000.0, 100.0, 7.0)[0] == "2 refused in the last hour, the last 7s ago (all: --refusals):"
    assert refused(100.0, 7.0, first=5)[0].startswith("at least 2 refused in the last hour, the last 7s ago")


XID_79 = "XID 79, GPU has fallen off the bus"
HURT = Health(HealthState.BAD, NOW - 240, XID_79, 1)


def test_each_fact_of_a_gpu_in_trouble_stands_once() -> None:
    """State, since when, why, and what to do: one block."""
    bad = make.gpu(1, health=HURT, unavailable=f"bad since 2027-01-15 07:56:00 UTC: {XID_79}; a reset is due")
    notes = HealthNotes(reset=f"a reset is due since {XID_79}", xid=XID_79, xid_at_s=NOW - 240)
    what = f"GPU 1 ({UUID}) is bad, because of: {XID_79}"
    change = Transition(kind=TransitionKind.HEALTH, what=what, uuid=UUID, index=1, worse=True)
    seen = view(
        node=make.node([make.gpu(0), bad]), notes={UUID: notes}, history=History(NOW - 900).having([change], NOW - 240)
    )
    page = plain(status_page(status_of(seen), Times(NOW)))
    assert (page.count("XID 79"), page.count("bad for 4m")) == (1, 1)
    _, _, block = page.partition(f"GPU 1 is bad for 4m: {XID_79}\n")
    due, reset, confirm, changes = block.splitlines()
    assert due == "  a reset is due: it is withheld until then"
    assert reset.startswith(f"  nvidia-smi --gpu-reset -i {UUID} ")
    assert confirm.startswith(f"  nri-gpu repaired {UUID} ")
    assert changes == "1 change in 15m (health 1)"


def test_a_gpu_out_of_use_has_a_block_with_who_and_why() -> None:
    cordon = answers.CordonStatus(at_s=NOW - 3600, by="anna", why="fan broken", until_reset=True)
    seen = view(node=make.node([make.gpu(0), make.gpu(1, cordon=Cordon())]), cordons={UUID: cordon})
    page = plain(status_page(status_of(seen), Times(NOW)))
    assert page.splitlines()[-2:] == [
        "GPU 1 is out of use for 1h until a reset of it is proven, by anna: fan broken",
        "  nri-gpu uncordon 1    # back into use",
    ]
    assert page.count("out of use") == 1


def test_a_node_without_a_driver_is_one_sentence() -> None:
    folders = f"{SOUGHT}/usr/lib, /lib64, /opt"
    fault = f"{NOT_FOUND}: {folders}{INSTALL}, or set the driver root to where it is"
    told = Transition(kind=TransitionKind.ANSWER, what=f"not refreshed: {fault}")
    seen = view(
        node=replace(make.node([]), driver_fault="no libcuda.so.V of a driver in any of /usr/lib, /lib64, /opt."),
        inventory_fault=fault,
        inventory_age_s=None,
        history=History(NOW - 900).having([told], NOW - 900),
    )
    page = plain(status_page(status_of(seen), Times(NOW)))
    assert page.splitlines()[2:] == [
        f"inventory not refreshed for 15m: {NOT_FOUND}; install the driver, or set the driver root to where it is "
        "(`nri-gpu driver` says where it was searched for)",
        "1 change in 15m (answer 1)",
    ]


@pytest.mark.parametrize(
    ("sampling", "ages_s", "said"),
    [
        (answers.SamplingStatus(), (3.0, 3.0), []),
        (answers.SamplingStatus(enabled=True), (64.0, 3.0), []),
        (answers.SamplingStatus(enabled=True), (66.0, 3.0), ["the last sample of GPU 0 is of 1m6s ago"]),
        (
            answers.SamplingStatus(enabled=True, fault="NVML hangs"),
            (66.0, 90.0),
            ["no newer sample of the GPUs: NVML hangs", "the last sample is of 1m30s ago"],
        ),
        (answers.SamplingStatus(enabled=True, each_second=True), (0.0, 0.0), [SAMPLING]),
    ],
)
def test_how_old_samples_are_and_who_makes_them(
    sampling: answers.SamplingStatus, ages_s: tuple[float, ...], said: list[str]
) -> None:
    status = status_of(view(node=make.node([make.gpu(0), make.gpu(1)])))
    gpus = tuple(
        replace(gpu, usage=answers.GpuUsage(sampled_s=NOW - age_s))
        for gpu, age_s in zip(status.gpus, ages_s, strict=True)
    )
    page = plain(status_page(replace(status, gpus=gpus, sampling=sampling), Times(NOW)))
    assert [line for line in page.splitlines() if "sample" in line] == said


def test_a_claim_for_programs() -> None:
    (said, _) = status_json(view(CLAIMS))["claims"]
    assert said.items() >= {"uid": "claim", "namespace": "ml", "name": "train", "pods": ["a", "b"]}.items()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "0s"), (0, "0s"), (7.9, "7s"), (60, "1m"), (61, "1m1s"), (3600, "1h"), (3605, "1h"), (90_000, "1d1h")],
)
def test_ages_are_written_as_kubectl_does(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("sentence", "aged"),
    [
        ("bad since 2027-01-15 07:00:00 UTC: XID 79", "bad for 1h: XID 79"),
        ("bad since 2027-99-99 07:00:00 UTC: XID 79", "bad since 2027-99-99 07:00:00 UTC: XID 79"),
        ("a reset is due since XID 79", "a reset is due since XID 79"),
    ],
)
def test_times_in_a_sentence_of_the_daemons_are_ages(sentence: str, aged: str) -> None:
    assert Times(NOW).aged(sentence) == aged
    assert Times(NOW, absolute=True).aged(sentence) == sentence


# --- health, as `gpus` and `status` show it ---------------------------------------------------------------------------

NODE = with_parts(look((), (Sign.THERMAL,)), 1, 0, 1)
STRICT = replace(RULES, other_xids=OtherXids.BAD)


def unhealthy(*, gpu: int | None = None, part: int | None = None, seconds: float = 5) -> Inventory:
    """After an XID of one of them, and a check so much later."""
    health = NodeHealth().after_inventory(NODE, STRICT, at(0))[0]
    event = xid(79, gpu) if gpu is not None else xid(94, 1)
    if part is not None:
        event = replace(event, gpu_instance=part + 1, compute_instance=0)
    health = health.after_event(event, STRICT, at(0))[0]
    return health.after_inventory(NODE, STRICT, at(seconds))[0].applied_to(NODE, STRICT)


def answer(inventory: Inventory) -> answers.DaemonStatus:
    return status_of(view(node=replace(make.node(), inventory=inventory)))


RECOVERED = make.inventory(
    [make.gpu(0, health=Health(HealthState.HEALTHY, NOW, "XID 79", 3), signs=(Sign.THERMAL,)), make.gpu(1)]
)
PART_LINE = "MIG device 1:0 is bad since 2023-11-14 22:13:20 UTC, because of: XID 94, contained ECC error; "


@pytest.mark.parametrize(
    ("inventory", "beginnings"),
    [
        (NODE, ["GPU 1 shows thermal"]),
        (unhealthy(part=0), ["GPU 1 shows thermal", f"{PART_LINE}its state changed once"]),
        (unhealthy(part=0, seconds=50), ["GPU 1 shows thermal", "MIG device 1:0 is recovering since "]),
        # A MIG device whose health is its GPU's has no line of its own.
        (unhealthy(gpu=1), ["GPU 1 is bad since 2023-11-14 22:13:20 UTC, because of: XID 79"]),
        (
            RECOVERED,
            [
                "GPU 0 is healthy since 2027-01-15 08:00:00 UTC, recovered from: XID 79; its state changed 3 times; "
                "shows thermal"
            ],
        ),
    ],
)
def test_a_line_for_each_that_is_or_was_not_healthy(inventory: Inventory, beginnings: list[str]) -> None:
    found = list(health_lines({gpu.place: gpu.health for gpu in answer(inventory).gpus}))
    assert len(found) == len(beginnings)
    assert all(line.startswith(beginning) for line, beginning in zip(found, beginnings, strict=True))


def test_health_in_the_table_of_gpus() -> None:
    gpu, first, second = unhealthy(part=0).units[1:]
    assert state_of(gpu) == Line("it is in MIG mode")
    assert (state_of(first).text[:10], state_of(first).tone) == ("bad since ", Tone.BAD)
    assert (state_of(second), state_of(make.gpu(1))) == (Line("ok, thermal", Tone.WARN), Line("ok", Tone.GOOD))


@pytest.mark.parametrize("inventory", [unhealthy(gpu=1), unhealthy(part=0), unhealthy(part=1), NODE])
def test_gpus_takes_health_from_the_daemon(inventory: Inventory) -> None:
    units = with_health(NODE, answer(inventory)).units
    assert [state_of(unit) for unit in units] == [state_of(unit) for unit in inventory.units]
    status = answer(inventory)
    newer = replace(status.gpus[0], health=answers.HealthStatus("unheard-of"))
    assert with_health(NODE, replace(status, gpus=(newer,))) is NODE


def test_a_missing_gpu_with_since_when_and_why() -> None:
    health = NodeHealth().after_inventory(NODE, RULES, at(0))[0]
    shown = look(())
    health = health.after_inventory(shown, RULES, at(9), frozenset({PARTS[0]}))[0]
    status = answer(health.applied_to(shown, RULES))
    why = "bad since 2023-11-14 22:13:29 UTC: GPU is lost: NVML does not list it any more"
    assert status.faults == (answers.FaultStatus(1, UUIDS[1], "0000:11:00.0", why, None),)
    page = plain(status_page(status, Times(at(9).wall_s + 3700)))
    assert "GPU 1 cannot be described: bad for 1h1m: GPU is lost: NVML does not list it any more" in page
    assert f"GPU 1 cannot be described: {why}" in plain(status_page(status, Times(NOW, absolute=True)))
