"""The bench: its arithmetic, and that it still runs; its figures are for people."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import first_grant
from bench.containerd import Given
from bench.contenders import CDI, CLAIMED_EIGHT, EIGHT, FLOOR, GO_INJECTOR, HOOKS, RIVALS, SAME, TREE, UNASKED
from bench.effort import Effort
from bench.figures import Figure, paired, percentile
from bench.record import Record, read
from bench.sites import Sites
from bench.wire import Contest
from nri_gpu.nri.subscription import event_mask
from nri_gpu.plugin.handlers import EVENTS
from tests import ground
from tests.support import packages
from tests.support.errors import HarnessError

PROJECT = Path(__file__).parents[2]


def test_a_figure_is_marked_against_its_budget() -> None:
    values = {0.9: "aim", 1.0: "aim", 1.01: "ok", 1.1: "ok", 1.11: "OVER"}
    assert {value: Figure("f", value, "x", 1.1, 1.0).line().split()[-1] for value in values} == values
    assert Figure("bare", 41.906, "ms", note="seen").line().split() == ["bare", "41.91", "ms", "seen"]


def test_a_slow_round_changes_no_ratio() -> None:
    ratio = paired([11.0, 22.0, 1100.0, 33.0], [10.0, 20.0, 1000.0, 30.0])
    assert ratio.median == pytest.approx(1.1)
    assert ratio.spread == pytest.approx(0.0)


def test_one_bad_sample_hardly_moves_the_median() -> None:
    ratio = paired([1.0, 1.1, 1.2, 1.3, 99.0], [1.0] * 5)
    assert ratio.median == pytest.approx(1.2)
    assert ratio.spread == pytest.approx(1.57 * 0.2 / 5**0.5)


def test_percentiles() -> None:
    samples = [float(number) for number in range(101)]
    assert [percentile(samples, percent) for percent in (50, 99)] == [50.0, 99.0]
    ratios = [figure.value for figure in Contest(samples, [2.0] * 101).figures("f") if figure.unit == "x"]
    assert ratios == [25.0, 49.5]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=240)


def test_the_wire_part_runs() -> None:
    done = run("--only", "wire", "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert "request to reply, 8-GPU grant, p50" in done.stdout
    assert "real containerd" not in done.stdout
    # Each with its budget, with the kubelet's half and without.
    for name in ("exec to registered with the kubelet", "kubelet and an open stream", "adds, as PSS", "a scrape"):
        lines = [line for line in done.stdout.splitlines() if name in line]
        assert lines
        assert all("<=" in line for line in lines)
    for process in ("nri-gpu", "inventory child", "event child"):
        (line,) = (line for line in done.stdout.splitlines() if f"with NVML, {process} " in line)
        assert 5 < float(line.split(process)[1].split()[0]) < 100


def test_the_part_about_deciding_runs() -> None:
    done = run("--only", "decide", "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert "decide, 1000 rules, p99" in done.stdout


def test_the_part_about_claims_runs() -> None:
    done = run("--only", "dra", "--samples", "2")
    assert done.returncode == 0, done.stderr
    for name in (
        "prepare, p99",
        "unprepare, p50",
        "prepare, 8 at once",
        "beside 100 prepared claims",
        "64 claims prepared",
    ):
        lines = [line for line in done.stdout.splitlines() if name in line]
        assert lines
        assert all("<=" in line for line in lines)
    assert "8-GPU grant, 100 claims, [dra] on to off" in done.stdout


@pytest.mark.containerd
def test_a_constant_reply_is_asked_for_as_often_as_ours(tmp_path: Path) -> None:
    """Each event is a round trip, validation too: a floor without them would be lower than any plugin's."""
    newest = packages.fetch(packages.available()[-1])
    with ExitStack() as stack:
        assert Sites(stack, tmp_path, tmp_path).events == event_mask(EVENTS, "0.12" if newest.validates else "")


@pytest.mark.containerd
def test_the_containerd_part_runs(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.fail("this test boots real containerds and needs root: run it with sudo, or deselect containerd")
    kept = tmp_path / "record.json"
    some = "asked|tree|8 GPUs of a claim|CDI|Go plugin|constant|/opt/a"
    words = ("--match", some, "--floor", "/opt/a,/usr/bin/nvidia-smi", "--json", str(kept))
    done = run("--only", "containerd", "--samples", "2", *words)
    assert done.returncode == 0, done.stderr
    found = read(kept)
    counts = {each.name: (each.nodes, each.mounts, each.hooks) for each in found.contenders}
    assert counts[UNASKED] == (0, 0, 0)
    assert counts["floor: /opt/a, /usr/bin/nvidia-smi"] == (11, 2, 0)
    assert counts[SAME] == counts[EIGHT]
    assert all(counts[name][0] == 11 for name in (EIGHT, TREE, CLAIMED_EIGHT, CDI, FLOOR))
    there = {name for rival in RIVALS if ground.built(rival.set_name) for name in rival.names}
    assert {each.name for each in found.left_out} == {name for rival in RIVALS for name in rival.names} - there
    assert all(f"Left out: {each.name}: " in done.stdout for each in found.left_out)
    if HOOKS in there:  # one for each GPU, and those of the container
        assert (counts[HOOKS][0], counts[HOOKS][2] > 8) == (11, True)
    if GO_INJECTOR in there:
        assert counts[GO_INJECTOR] == (11, 36, 0)
    assert all(len(each.wall_ms) == 2 and min(each.started_per_second) > 0 for each in found.contenders)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from bench import __main__ as bench

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "containerd"])
    bench.main()
    assert "Left out: a private containerd needs root" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"), [(("--samples", "1"), "at least 2"), (("--floor", "opt/x"), "absolute paths in the container")]
)
def test_a_wrong_word_on_the_command_line(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_floors_and_a_match_are_named_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import __main__ as bench

    given = list[Given]()

    def measure(_: Effort, names: Given) -> Record:
        given.append(names)
        raise HarnessError("not now")

    monkeypatch.setattr("bench.containerd.measure", measure)
    words = ["--only", "containerd", "--floor", "/a,/b", "--floor", "/c", "--match", "floor"]
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    bench.main()
    assert given == [Given([("/a", "/b"), ("/c",)], "floor")]


def test_modules_and_hops_of_a_trace() -> None:
    calls = [("", "plugin/transport"), ("plugin/transport", "ttrpc/mux"), ("ttrpc/mux", "ttrpc/mux")]
    assert first_grant.report(calls) == ["plugin/transport", "ttrpc/mux", "", "2 modules, 1 hops, 3 calls"]
