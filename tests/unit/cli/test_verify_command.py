"""`nri-gpu verify` without a container: what it prints of a report, and what it says where it cannot see."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec import to_builtins

from nri_gpu.cli.verify_command import _stage_dir, code_of
from nri_gpu.daemon.answers import InventoryAnswer, ObserverStatus
from nri_gpu.domain.errors import Exit
from nri_gpu.records.policy_file import LAST_GOOD
from nri_gpu.system.storage import KEY_BYTES
from nri_gpu.verify.container_report import Report
from nri_gpu.verify.node_snapshot import SNAPSHOT_FILE, Evidence, Snapshot, to_bytes
from nri_gpu.verify.oci_bundles import TASKS
from tests.support import builders as make
from tests.support.views import status_json, view
from tests.unit.cli.conftest import FREE, NriGpuCall
from tests.unit.cli.printed import BAD, GOOD, HIDDEN, report

KEY = bytes(KEY_BYTES)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder with a key, beside a containerd without containers."""
    (tmp_path / "state").mkdir()
    (tmp_path / "ctrd" / TASKS).mkdir(parents=True)
    key = tmp_path / "state" / "key"
    key.touch(0o600)
    key.write_bytes(KEY)
    return tmp_path / "state"


@contextmanager
def daemon(state: Path, answers: Mapping[str, object]) -> Iterator[None]:
    """Something that answers these questions until it is left."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(state / "control.sock"))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):  # shut down
                while True:
                    connection, _address = listener.accept()
                    with connection:
                        connection.sendall(json.dumps(answers[connection.recv(100).decode().strip()]).encode())

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    (state / "control.sock").unlink()


def options(state: Path) -> list[object]:
    return ["--state-dir", state, "--containerd-state", state.parent / "ctrd"]


INVENTORY = to_builtins(InventoryAnswer(make.inventory()))


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (report(), Exit.OK),
        (report(GOOD), Exit.OK),
        (report(GOOD, BAD, HIDDEN), Exit.FINDING),
        (report(HIDDEN), Exit.UNAVAILABLE),
        (report(HIDDEN, denied=True), Exit.PERMISSION),
        (report(GOOD, unseen=("one is missing",)), Exit.UNAVAILABLE),
    ],
)
def test_exit_codes(found: Report, code: Exit) -> None:
    assert code_of(found) is code


def test_a_node_without_containers(nri_gpu: NriGpuCall, state: Path) -> None:
    with daemon(state, {"status": FREE, "inventory": INVENTORY}):
        done = nri_gpu("verify", *options(state), "-o", "json")
    assert (done.code, done.err) == (Exit.OK, "")
    assert done.document == {
        "schema": "nri-gpu/verify/v1",
        "node": {"name": "node1"},
        **{"numbers_from": "daemon", "containers": [], "unseen": [], "denied": False},
    }


def test_a_holder_that_no_runtime_shows(nri_gpu: NriGpuCall, state: Path) -> None:
    holder = {"container_id": "0a1b", "namespace": "ml", "pod": "train", "running": True, "since_s": None}
    rest = {
        "container": "main",
        "pod_uid": "u",
        "mode": "exclusive",
        "phase": "running",
        "gpu_uuids": [],
        "driver_generation": "-",
    }
    first, *others = FREE["gpus"]
    status = FREE | {"gpus": [first | {"holders": [holder | rest]}, *others]}
    with daemon(state, {"status": status, "inventory": INVENTORY}):
        done = nri_gpu("verify", *options(state))
    assert done.code == Exit.UNAVAILABLE
    assert (
        "not seen: container 0a1b of ml/train, which has GPUs: it belongs to no containerd that was examined"
        in done.out
    )


def test_a_daemon_that_does_not_know_its_gpus(nri_gpu: NriGpuCall, state: Path) -> None:
    blind = to_builtins(InventoryAnswer(make.inventory((), fault="the driver does not answer")))
    with daemon(state, {"status": FREE, "inventory": blind}):
        done = nri_gpu("verify", *options(state))
    assert (done.code, "are not known: the driver does not answer" in done.err) == (Exit.UNAVAILABLE, True)


def test_a_daemon_of_another_version(nri_gpu: NriGpuCall, state: Path) -> None:
    with daemon(state, {"status": {"schema": "nri-gpu/status/v2"}, "inventory": INVENTORY}):
        done = nri_gpu("verify", *options(state))
    assert (done.code, "not seen: which containers have GPUs according to the daemon" in done.out) == (
        Exit.UNAVAILABLE,
        True,
    )


def test_without_a_daemon_its_snapshot_says_the_numbers(nri_gpu: NriGpuCall, state: Path) -> None:
    evidence = Evidence(
        boot_id="b", program="p", module_version="m", settings=("/", "/stage"), host=(), staged=(), sight=""
    )
    snapshot = Snapshot(evidence=evidence, inventory=make.inventory(), driver=make.driver())
    (state / SNAPSHOT_FILE).write_bytes(to_bytes(snapshot, KEY))
    done = nri_gpu("verify", *options(state))
    assert (done.code, done.out) == (
        Exit.OK,
        "node1: 0 containers; no daemon answers, so device numbers are from its last snapshot\n",
    )
    (state / SNAPSHOT_FILE).write_bytes(b"edited")
    done = nri_gpu("verify", *options(state))
    assert done.code == Exit.UNAVAILABLE
    assert "it was not written by a daemon with this state folder's key" in done.err


def test_neither_daemon_nor_snapshot(nri_gpu: NriGpuCall, state: Path) -> None:
    done = nri_gpu("verify", *options(state))
    assert done.code == Exit.UNAVAILABLE
    assert "which device numbers the GPUs have is not known" in done.err
    assert "is `nri-gpu run` running?" in done.err


def test_keys(nri_gpu: NriGpuCall, state: Path) -> None:
    key = state / "key"
    key.write_bytes(b"short")
    done = nri_gpu("verify", *options(state))
    assert (done.code, "is not 32 bytes long" in done.err) == (Exit.UNAVAILABLE, True)
    key.chmod(0o644)
    done = nri_gpu("verify", *options(state))
    assert (done.code, "lets users other than root use it" in done.err) == (Exit.PERMISSION, True)
    key.unlink()
    done = nri_gpu("verify", *options(state))
    assert (done.code, "no key " in done.err) == (Exit.UNAVAILABLE, True)


def test_no_containerd(nri_gpu: NriGpuCall, state: Path) -> None:
    with daemon(state, {"status": FREE, "inventory": INVENTORY}):
        done = nri_gpu("verify", "--state-dir", state, "--containerd-state", state)
    assert (done.code, "no containerd keeps containers below" in done.err) == (Exit.UNAVAILABLE, True)


def test_in_a_pod_without_containerds_folder_it_says_to_run_it_on_the_node(
    nri_gpu: NriGpuCall, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with daemon(state, {"status": FREE, "inventory": INVENTORY}):
        done = nri_gpu("verify", "--state-dir", state, "--containerd-state", state)
    assert (done.code, "run `nri-gpu verify` on the node" in done.err) == (Exit.UNAVAILABLE, True)


def test_a_broken_policy_file_and_the_last_good_one(nri_gpu: NriGpuCall, state: Path) -> None:
    """The stage folder is the policy's; the daemon itself goes on with the last good one."""
    policy = state.parent / "policy.toml"
    policy.write_text("schema = ")
    with daemon(state, {"status": FREE, "inventory": INVENTORY}):
        assert nri_gpu("verify", *options(state), "--policy", policy).code == Exit.CONFIGURATION
        (state / LAST_GOOD).write_text("schema = 1\n")
        assert nri_gpu("verify", *options(state), "--policy", policy).code == Exit.OK


@pytest.mark.usefixtures("nri_gpu")
def test_the_stage_folder_of_a_policy_that_options_mend(state: Path) -> None:
    """No daemon says which options it has."""
    policy = state.parent / "policy.toml"
    policy.write_text('[driver]\nstage_dir = "/srv/staged"\n[kubelet]\nenabled = true\n[dra]\nenabled = true\n')
    assert _stage_dir(str(policy), state) == Path("/srv/staged")


@pytest.mark.usefixtures("nri_gpu")
def test_the_stage_folder_of_a_policy_that_vanished(state: Path) -> None:
    """It is that of the last good policy, on which the daemon goes on, and not the default one."""
    (state / LAST_GOOD).write_text('[driver]\nstage_dir = "/srv/staged"\n')
    assert _stage_dir(None, state) == Path("/srv/staged")


def test_beside_an_observer_no_key_is_needed(nri_gpu: NriGpuCall, state: Path) -> None:
    (state / "key").unlink()
    answers = {"usage": {}, "status": status_json(view(observer=ObserverStatus(looked_s=1.0))), "inventory": INVENTORY}
    with daemon(state, answers):
        done = nri_gpu("verify", *options(state))
        document = nri_gpu("verify", *options(state), "-o", "json").document
    assert "an observer answers" in done.out
    assert document["numbers_from"] == "observer"


def test_an_observer_that_has_not_looked_yet(nri_gpu: NriGpuCall, state: Path) -> None:
    answers = {"usage": {}, "status": status_json(view(observer=ObserverStatus())), "inventory": INVENTORY}
    with daemon(state, answers):
        done = nri_gpu("verify", *options(state))
    assert (done.code, done.out) == (Exit.UNAVAILABLE, "")
    assert "has not looked at this node yet" in done.err
