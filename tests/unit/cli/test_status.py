from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.ledger import GrantPhase, Ledger, Releasing
from nri_gpu.allocation.reservations import reserve
from nri_gpu.cli.main import main
from nri_gpu.cli.status import ago, to_text
from nri_gpu.daemon.report import RuntimeConnection, status_json
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.gpu import PciBusId
from nri_gpu.domain.health import History, Transition, TransitionKind
from nri_gpu.domain.kubelet import AllocatedDevice, ResourceStatus
from nri_gpu.domain.mps import MpsFolders, Seat
from nri_gpu.domain.node import GpuFault, KernelGpu
from nri_gpu.plugin.guard_status import GuardStatus, process_started, write_guard_status
from tests.support import builders as make
from tests.unit.daemon.test_report import CLOCK, NOW, view

FREE = status_json(view(node=make.node(driver_version="580.95.05")))


@contextmanager
def daemon(folder: Path, answer: bytes) -> Iterator[str]:
    """Something that answers one question with these bytes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control.sock"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield str(folder)
        thread.join()


def asked(folder: Path, answer: Mapping[str, Any] | bytes, *options: str) -> int:
    encoded = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    with daemon(folder, encoded) as state:
        return main(["status", "--state-dir", state, *options])


def test_the_kubelets_resources_have_a_line_each() -> None:
    standings = (
        ResourceStatus("nvidia.com/gpu", NOW - 200),
        ResourceStatus("nvidia.com/mig-1g.5gb", None, "no kubelet listens"),
    )
    lines = to_text(status_json(view(kubelet=standings)), NOW).splitlines()
    assert lines[-3:] == [
        "kubelet: nvidia.com/gpu registered for 3m20s",
        "kubelet: nvidia.com/mig-1g.5gb not registered: no kubelet listens",
        "kubelet: containers with GPUs cannot start without nri-gpu, whether daemon and guard run or not",
    ]
    alone = to_text(status_json(view(kubelet=standings, kubelet_open="NRI 0.6")), NOW)
    assert alone.endswith("kubelet: only the guard stops containers that start without their GPUs: NRI 0.6")
    assert "kubelet" not in to_text(FREE, NOW)
    of_an_older_daemon = {key: value for key, value in FREE.items() if key != "kubelet"}
    assert to_text(of_an_older_daemon, NOW) == to_text(FREE, NOW)


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(tmp_path, FREE) == Exit.OK
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "containerd 2.1.9, driver 580.95.05, policy: /etc/nri-gpu/policy.toml"
    assert said[1].split() == ["GPU", "MODEL", "MODE", "HELD", "BY", "CONTAINER", "FOR", "UNAVAILABLE"]
    assert len(said) == 2 + make.GPUS


def test_json_is_what_the_daemon_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(tmp_path, FREE, "-o", "json") == Exit.OK
    assert json.loads(capsys.readouterr().out) == FREE


def test_holders_one_line_each() -> None:
    train, other = make.container(of="train"), make.container(of="other")
    ledger = make.ledger(
        make.entry(0, to=train, mode=Mode.SHARED, since=CLOCK - 3700),
        make.entry(0, to=other, mode=Mode.SHARED, since=CLOCK - 5, phase=GrantPhase.CREATED),
        others=[make.foreign(2)],
    )
    lines = to_text(status_json(view(ledger)), NOW).splitlines()[2:]
    assert lines[0].split()[-4:] == ["shared", "ml/train", "main", "1h1m"]
    assert lines[1].split() == ["ml/other", "main", "5s", "(created)"]
    assert lines[3].split()[-3:] == ["ml/plugin", "-", "-"]


def test_what_the_kubelet_gave_and_nobody_has_says_since_when() -> None:
    given = reserve(Ledger(), [AllocatedDevice("nvidia.com/gpu", make.uuid(0))], CLOCK - 200, shared=False)
    (line,) = [line for line in to_text(status_json(view(given)), NOW).splitlines() if "(reserved)" in line]
    assert line.split()[-3:] == ["-", "3m20s", "(reserved)"]


def test_a_lost_gpu_that_is_held_says_so() -> None:
    node = make.node([make.gpu(0, unavailable="nvmlDeviceGetName: GPU is lost (15)"), make.gpu(1)])
    ledger = make.ledger(make.entry(0, since=CLOCK - 5), make.entry(1, since=CLOCK - 5, to=make.container(of="other")))
    lines = to_text(status_json(view(ledger, node=node)), NOW).splitlines()[2:4]
    assert lines[0].endswith("ml/train  main       5s   nvmlDeviceGetName: GPU is lost (15)")
    assert lines[1].endswith("ml/other  main       5s")


def test_a_gpu_that_is_not_to_be_had_says_why() -> None:
    said = status_json(view(node=make.node([make.gpu(0, unavailable="it fell off the bus")])))
    assert "it fell off the bus" in to_text(said, NOW)


def test_what_is_said_of_gpus_ages_visibly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hung = status_json(view(inventory_fault="nvmlInit did not return within 30 s", inventory_age_s=185.0))
    assert asked(tmp_path, hung) == Exit.FINDING
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "nvmlInit did not return within 30 s (its GPUs were last confirmed 3m5s ago)"
    older = status_json(view(inventory_fault="no driver", inventory_age_s=185.0, inventory_confirmed=False))
    assert to_text(older, NOW).splitlines()[-2:] == [
        "from the last snapshot, 3m5s old: the driver has not answered yet",
        "no driver",
    ]
    never = status_json(view(inventory_fault="no driver", inventory_age_s=None))
    assert to_text(never, NOW).splitlines()[-1] == "no driver"


def test_a_gpu_that_the_kernel_alone_knows_of() -> None:
    away = KernelGpu(pci_bus_id=PciBusId("0000:70:00.0"), reason="bound to vfio-pci", model="NVIDIA L4")
    said = status_json(view(node=make.node(unlisted=(away,))))
    assert "GPU 0000:70:00.0 NVIDIA L4 cannot be granted: bound to vfio-pci" in to_text(said, NOW).splitlines()
    none = status_json(view(node=make.node([], fault="no driver", unlisted=(replace(away, reason="no driver"),))))
    assert "GPU 0000:70:00.0 NVIDIA L4 is seen by the kernel only" in to_text(none, NOW).splitlines()


def test_a_gpu_that_was_just_released_says_for_whom_it_waits() -> None:
    ledger = make.ledger().with_releasing({make.uuid(0): Releasing(PodUid("uid"), "ml/train", CLOCK, 60.0, 1)})
    (line,) = [line for line in to_text(status_json(view(ledger)), NOW).splitlines() if "ml/train" in line]
    assert line.endswith("-    just released by ml/train: 1 process still holds it")


def test_who_was_left_by_an_mps_daemon_is_to_be_restarted() -> None:
    rows = {"old": "a", "new": "b", "created": "a"}
    entries = {name: make.entry(0, to=make.container(of=name), mode=Mode.MPS) for name in rows}
    seated = {
        name: replace(entry, grant=replace(entry.grant, seat=Seat(folder=f"/m/{make.uuid(0)}.{rows[name]}")))
        for name, entry in entries.items()
    }
    seated["created"] = replace(seated["created"], phase=GrantPhase.CREATED)
    node = replace(make.node(), mps=MpsFolders("/m", "b"))
    said = status_json(view(make.ledger(*seated.values()), node))
    assert [bool(each["restart"]) for each in said["gpus"][0]["holders"]] == [True, False, False]
    (line,) = [line for line in to_text(said, NOW).splitlines() if "restart it" in line]
    assert line.startswith("ml/old, container main: its MPS daemon has ended")


def test_what_happened_to_the_node_and_when() -> None:
    gone = Transition(kind=TransitionKind.GPU, what="GPU 3 is gone", uuid=make.uuid(3), index=3)
    history = History(began_s=NOW - 60).having([gone] * 11, NOW)
    lines = to_text(status_json(view(history=history)), NOW).splitlines()
    assert lines[-11:] == [
        "11 changes since 2027-01-15 07:59:00 UTC (gpu 11), the last:",
        *["  2027-01-15 08:00:00 UTC  GPU 3 is gone"] * 10,
    ]


def test_a_gpu_without_a_name_and_a_driver_that_does_not_answer_since_when() -> None:
    node = make.node()
    node = replace(node, inventory=replace(node.inventory, faults=(GpuFault(5, "gone"),)))
    history = History().having(
        [
            Transition(kind=TransitionKind.DESCRIPTION, what="-", index=5),
            Transition(kind=TransitionKind.ANSWER, what="-"),
        ],
        NOW,
    )
    said = to_text(status_json(view(node=node, history=history, inventory_fault="NVML hangs")), NOW)
    assert "GPU 5 cannot be described since 2027-01-15 08:00:00 UTC: gone" in said
    assert "NVML hangs since 2027-01-15 08:00:00 UTC" in said


def test_a_daemon_from_before_says_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    added = ("transitions", "faults")
    assert asked(tmp_path, {key: value for key, value in FREE.items() if key not in added}) == Exit.OK
    assert "changes since" not in capsys.readouterr().out


def test_no_gpus() -> None:
    assert "no GPUs" in to_text(status_json(view(node=make.node([]))), NOW)


def test_a_daemon_that_cannot_grant_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = status_json(
        view(connection=RuntimeConnection(ready=False, since=NOW, why="no NRI socket"), policy_fault="line 3")
    )
    assert asked(tmp_path, away) == Exit.FINDING
    said = capsys.readouterr().out
    assert "not connected to the runtime: no NRI socket" in said
    assert "policy not usable: line 3" in said


def test_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--state-dir", str(tmp_path)]) == Exit.UNAVAILABLE
    assert "is `nri-gpu run` running?" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"", b"nonsense", b"[]", b'{"error": "too many"}'])
def test_an_answer_that_is_none(tmp_path: Path, answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(tmp_path, answer) == Exit.UNAVAILABLE
    assert "no answer from the daemon at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "0s"), (0, "0s"), (7.9, "7s"), (60, "1m"), (61, "1m1s"), (3600, "1h"), (3605, "1h"), (90_000, "1d1h")],
)
def test_ages_are_written_as_kubectl_does(seconds: float, words: str) -> None:
    assert ago(seconds) == words


def test_alive_is_who_answers_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = status_json(view(connection=RuntimeConnection(ready=False, since=NOW, why="no NRI socket")))
    assert asked(tmp_path, away, "--alive") == Exit.OK
    assert not capsys.readouterr().out
    assert main(["status", "--state-dir", str(tmp_path / "none"), "--alive"]) == Exit.UNAVAILABLE


def guard(folder: Path, *, connected: bool) -> Path:
    write_guard_status(folder, GuardStatus(pid=os.getpid(), started=process_started(os.getpid()), connected=connected))
    return folder / "guard.json"


def test_a_guard_is_ready_when_connected_and_alive_before(tmp_path: Path) -> None:
    asking = ["status", "--guard", str(tmp_path)]
    assert main(asking) == Exit.UNAVAILABLE
    guard(tmp_path, connected=False)
    assert main(asking) == Exit.FINDING
    assert main([*asking, "--alive"]) == Exit.OK
    guard(tmp_path, connected=True)
    assert main(asking) == Exit.OK


def test_a_guard_that_says_nothing_any_more_is_not_alive(tmp_path: Path) -> None:
    file = guard(tmp_path, connected=True)
    long_ago = time.time() - 60
    os.utime(file, (long_ago, long_ago))
    assert main(["status", "--guard", str(tmp_path), "--alive"]) == Exit.UNAVAILABLE
