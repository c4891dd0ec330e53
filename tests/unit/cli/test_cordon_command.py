"""Root takes a GPU out of use and back by a verb; what the verbs say of it that ask NVML themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.cli import ask_daemon
from nri_gpu.cli.ask_daemon import with_cordons
from nri_gpu.cordon.cordon_file import FILE, CordonError, CordonRecord, write_cordons
from nri_gpu.daemon.answers import CordonStatus
from nri_gpu.daemon.view import status_of
from nri_gpu.decision.refusals import CORDONED, CORDONS_UNKNOWN, why_not
from nri_gpu.domain.errors import Exit
from nri_gpu.policy.usage_settings import UsageSettings
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS, UUIDS, Launch, NriGpu
from tests.support.views import view
from tests.support.waiting import wait_for
from tests.unit.cli.conftest import NriGpuCall

USAGE_FAULTS = {
    "without a reason": ["cordon", "0"],
    "an empty reason": ["cordon", "0", "--why", " "],
    "a line break": ["cordon", "0", "--why", "fan\nbroken"],
    "too long": ["cordon", "0", "--why", "x" * 201],
    "not ASCII": ["cordon", "0", "--why", "Lüfter"],
}


@pytest.mark.parametrize("words", USAGE_FAULTS.values(), ids=USAGE_FAULTS)
def test_a_reason_is_one_line_of_printable_ascii(nri_gpu: NriGpuCall, words: list[str]) -> None:
    try:
        done = nri_gpu(*words)
    except SystemExit as error:
        assert error.code == Exit.USAGE
    else:
        assert done.code == Exit.USAGE
        assert "1 to 200 printable ASCII characters" in done.err


def test_where_no_daemon_runs(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    for words in (["cordon", "0", "--why", "fan"], ["uncordon", "0"]):
        assert nri_gpu(*words, "--state-dir", tmp_path).code == Exit.UNAVAILABLE
    done = nri_gpu("uncordon", "0 1", "--state-dir", tmp_path)
    assert (done.code, "is no GPU" in done.err) == (Exit.FINDING, True)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[NriGpu]:
    """A simulated node, which keeps only what a policy names a folder for."""
    (tmp_path / "kept").mkdir()
    policy = f'[usage]\ndir = "{tmp_path}/kept"\n[audit]\nmax_mib = 1\n'
    topology = tmp_path / "node.toml"
    topology.write_text(FOUR_GPUS.read_text())
    launch = Launch(tmp_path / "d", tmp_path / "no-runtime", topology=topology).with_policy(policy)
    with NriGpu(launch) as running:
        wait_for("its GPUs", lambda: "A100" in running.verb("status").stdout, 20)
        yield running


def test_out_of_use_and_back(nri_gpu: NriGpuCall, daemon: NriGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said to root, in `status`, in the log and in the audit log."""
    monkeypatch.setenv("SUDO_USER", "alice")

    def said(*words: str) -> tuple[int, str]:
        done = nri_gpu(*words, "--state-dir", daemon.launch.state)
        return done.code, done.out + done.err

    code, text = said("cordon", "3", "--why", "fan broken, ticket 4711")
    assert (code, text) == (
        Exit.OK,
        f"{UUIDS[3]} is out of use: nothing new is granted it, until nri-gpu uncordon {UUIDS[3]}\n",
    )
    gpu = daemon.status()["gpus"][3]
    assert (gpu["withheld"], gpu["cordoned"]["by"], gpu["cordoned"]["until_reset"]) == (CORDONED, "alice", False)
    page = daemon.verb("status").stdout
    assert re.search(r"GPU 3 is out of use for \d+s, by alice: fan broken, ticket 4711", page)
    assert "nri-gpu uncordon GPU-3" in daemon.verb("doctor").stdout
    assert said("cordon", UUIDS[3], "--why", "again") == (
        Exit.FINDING,
        f"nri-gpu: {UUIDS[3]}: it is out of use already, by alice: fan broken, ticket 4711\n",
    )
    code, text = said("cordon", "9", "--why", "again")
    assert (code, "this node has no GPU 9: name a GPU by" in text) == (Exit.FINDING, True)
    assert said("uncordon", "3") == (Exit.OK, f"{UUIDS[3]} is in use again\n")
    assert said("uncordon", "3")[0] == Exit.FINDING
    assert said("cordon", "2", "--why", "reset", "--until-reset")[0] == Exit.OK
    code, text = said("repaired", "2")
    assert (code, text) == (Exit.OK, f"{UUIDS[2]} is in use again: it was taken out of use until its reset\n")
    assert 'reason="by alice"' in daemon.wait_logged("GPU is in use again")
    audit = daemon.folder / "audit.jsonl"
    wait_for("the audit log", lambda: audit.read_text().count('"kind":"cordoned"') == 4, 10)
    assert '"by":"alice","why":"fan broken, ticket 4711","ended":""' in audit.read_text()


def test_a_gpu_that_is_unhealthy_stays_withheld_and_the_answer_says_so(nri_gpu: NriGpuCall, daemon: NriGpu) -> None:
    assert daemon.launch.topology
    daemon.verb("cordon", "0", "--why", "fan")
    daemon.launch.topology.write_text(FOUR_GPUS.read_text() + "[[event]]\nat_s = 0\ngpu = 0\nxid = 79\n")
    wait_for("its end", lambda: daemon.status()["gpus"][0]["health"]["state"] == "bad", 20)
    done = nri_gpu("uncordon", "0", "--state-dir", daemon.launch.state)
    assert (done.code, "XID 79" in done.out) == (Exit.OK, True)


def test_a_simulated_node_without_a_named_folder_keeps_none(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    with NriGpu(Launch(tmp_path / "d", tmp_path / "no-runtime")) as daemon:
        wait_for("its GPUs", lambda: "A100" in daemon.verb("status").stdout, 20)
        done = nri_gpu("cordon", "0", "--why", "fan", "--state-dir", daemon.launch.state)
    assert (done.code, "nothing is kept of a simulated node" in done.err) == (Exit.FINDING, True)


def test_what_asks_nvml_takes_it_from_the_daemon_else_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, found = UsageSettings(dir=str(tmp_path)), make.inventory()

    def why(status: object = None) -> list[str]:
        return [why_not(gpu) for gpu in with_cordons(found, status, settings).gpus]  # type: ignore[arg-type]

    assert why() == [""] * 4, "no file is nothing out of use"
    write_cordons(tmp_path, {make.uuid(1): CordonRecord(at_s=1.0, by="root", why="fan")})
    assert why() == ["", CORDONED, "", ""]
    cordons = {make.uuid(2): CordonStatus(at_s=1.0, by="root", why="fan")}
    assert why(status_of(view(cordons=cordons))) == ["", "", CORDONED, ""]
    assert why(status_of(view(cordon_fault="damaged"))) == [CORDONS_UNKNOWN] * 4
    (tmp_path / FILE).write_text("")
    assert why() == [CORDONS_UNKNOWN] * 4

    def denied(folder: object) -> None:
        raise CordonError("no", denied=True)

    monkeypatch.setattr(ask_daemon, "kept_cordons", denied)
    assert why() == [""] * 4
    assert capsys.readouterr().err == "nri-gpu: only root sees which GPUs are taken out of use\n"
