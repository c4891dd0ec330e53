"""The command line: what each verb takes, what help teaches, and which code comes out."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nri_gpu import __version__
from nri_gpu.cli import check_command, gpus_command
from nri_gpu.cli import main as cli
from nri_gpu.daemon import logs
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.policy.document import SECTIONS, options_in, setting
from nri_gpu.policy.forms import settings_of
from tests.support.daemon import FOUR_GPUS
from tests.support.nvml import FakeGpu, build_fake_nvml

SWITCHES = {"--kubelet", "--dra", "--metrics-public"}
VERBS = [verb.name for verb in cli.VERBS]


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_verb_and_an_annotation_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    names = "run guard dra gpus status repaired verify driver check doctor cdi explain replay prepare"
    assert names.split() == VERBS
    text = helped(capsys)
    assert all(verb.help in " ".join(text.split()) for verb in cli.VERBS)
    assert 'gpu.nri.io: "2"' in text
    assert "78 configuration" in text


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    text = helped(capsys, verb)
    declared = next(each for each in cli.VERBS if each.name == verb)
    for flags, settings in declared.options:
        if settings["help"] == argparse.SUPPRESS:
            assert flags[0] not in text
            continue
        assert str(settings["help"]) in " ".join(text.split()) or len(str(settings["help"])) > 60
        assert flags[0] in text or str(settings.get("metavar", "")) in text
    assert all(line in text for line in declared.teach.splitlines())
    assert "exit codes" in text
    assert all(len(line) <= 160 for line in text.splitlines())


@pytest.mark.parametrize("verb", ["run", "check"])
def test_every_option_over_the_policy_is_one_of_run_and_of_check(verb: str) -> None:
    settings = [setting(f"{section}.{key}") for section, cls in SECTIONS.items() for key in settings_of(cls)]
    flags = {each.flag for each in settings if each.flag}
    declared = {name for each in cli.VERBS if each.name == verb for names, _ in each.options for name in names}
    assert {names[0] for names, _ in cli.OVERRIDES} == flags <= declared
    words = [f"{flag}=a" if flag not in SWITCHES else flag for flag in flags]
    args = vars(cli._parser().parse_args([verb, *words]))
    assert {setting(path).flag for path in options_in(args)} == flags
    assert options_in(vars(cli._parser().parse_args([verb]))) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: VERB"),
        (["dance"], "invalid choice: 'dance'"),
        (["gpus", "--fast"], "unrecognized arguments: --fast"),
        (["gpus", "-o", "yaml"], "invalid choice: 'yaml'"),
        (["explain"], "required: POD.yaml"),
        (["run", "--log-level", "loud"], "invalid choice: 'LOUD'"),
    ],
)
def test_wrong_usage_is_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.delenv("NRI_PLUGIN_SOCKET", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == Exit.USAGE
    assert words in capsys.readouterr().err


# What a command line of 0.1.0 may have and nothing reads any more; and words of what to do instead.
DROPPED = {
    "cdi": (["--watch", "--log-level", "debug"], ["enable nri-gpu-cdi.path", "leave it out"]),
    "gpus": (
        ["--watch", "--topology", "--scrub"],
        ["run `nri-gpu status --watch`", "run `nvidia-smi topo -m`", "replace the UUIDs"],
    ),
    "verify": (["--watch", "--every", "nan"], ["run `nri-gpu verify` from a timer", "the interval of that timer"]),
}


@pytest.mark.parametrize(("verb", "options", "fixes"), [(verb, *each) for verb, each in DROPPED.items()])
def test_an_option_that_is_gone_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    options: list[str],
    fixes: list[str],
) -> None:
    monkeypatch.setattr(f"nri_gpu.cli.{verb}_command.run", lambda _: 40)
    told = next(each.options for each in cli.VERBS if each.name == verb)
    assert {flags[0] for flags, settings in told if settings["help"] == argparse.SUPPRESS} <= {*options}
    positional = ["generate"] if verb == "cdi" else []
    for given, expected in ((options, fixes), ([], [])):
        assert cli.main([verb, *positional, *given]) == 40
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(expected)
        assert all(each.startswith("WARNING option was removed and is ignored ") for each in lines)
        assert all(fix in line for fix, line in zip(expected, lines, strict=True))


@pytest.mark.parametrize("verb", [each.name for each in cli.VERBS if any(cli.LOG_LEVEL is one for one in each.options)])
def test_a_verb_that_serves_sets_up_the_log_once(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Each handler of loguru's takes a twentieth of the daemon's start. It is there before anything can be logged."""
    added: list[str] = []

    def set_up(level: str, **_: bool) -> None:
        added.append(level)
        raise CommandError(Exit.USAGE, "as far as this test goes")

    monkeypatch.setattr(logs, "set_up_command", lambda: added.append("WARNING"))
    monkeypatch.setattr(logs, "set_up", set_up)
    assert cli.main([verb, "--log-level", "error"]) == Exit.USAGE
    assert added == ["ERROR"]


def test_launched_by_the_runtime_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime passes no arguments, only NRI_PLUGIN_SOCKET."""
    from nri_gpu.cli import run_command

    monkeypatch.setenv("NRI_PLUGIN_SOCKET", "3")
    monkeypatch.setattr(run_command, "run", lambda args: 40 + (args.log_level == "INFO"))
    assert cli.main([]) == 41


def test_a_bug_is_70_and_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: object) -> int:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(check_command, "run", broken)
    assert cli.main(["check"]) == Exit.BUG
    assert "ZeroDivisionError: oh" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpus_command, "run", interrupted)
    assert cli.main(["gpus"]) == 130


FOREIGN = ("yaml", "pynvml", "grpc", "ctypes", "rich", "urllib3", "prometheus_client")
# A bug in what decides must not be a bug of the guard's, nor its memory the guard's.
DECIDING = ("decision.decide", "injection", "inventory", "driver", "host", "allocation.placement")
NOT_LOADED = {
    "from nri_gpu.cli import main; main._parser()": ("nri_gpu.daemon", "nri_gpu.cli.run_command", *FOREIGN),
    "import nri_gpu.cli.run_command": ("nri_gpu.cli.explain_command", "nri_gpu.inventory.nvml_program", *FOREIGN),
    "import nri_gpu.plugin.guard_process": (*(f"nri_gpu.{name}" for name in DECIDING), *FOREIGN),
    f"from nri_gpu.cli.main import main; main(['gpus', '--gpus', '{FOUR_GPUS}'])": FOREIGN,
}


@pytest.mark.parametrize(
    ("statement", "modules"), NOT_LOADED.items(), ids=["every verb", "daemon", "guard", "a verb in a pipe"]
)
def test_nobody_pays_for_what_it_does_not_use(statement: str, modules: tuple[str, ...]) -> None:
    script = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    parts = {each for each in done.stdout.split() for name in modules if f"{each}.".startswith(f"{name}.")}
    assert not parts


def test_a_command_logs_warnings_alone(tmp_path: Path) -> None:
    """A driver whose NVML lacks a function is worth a line in the daemon's log, not on a terminal."""
    root = build_fake_nvml(tmp_path, [FakeGpu()], without=["nvmlDeviceGetPciInfo_v3"])
    command = [sys.executable, "-m", "nri_gpu", "gpus", "--driver-root", str(root), "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (Exit.OK, "")


@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_who_has_enough(lines: int) -> None:
    """`nri-gpu gpus | head -1`: no traceback, no odd code."""
    reading, writing = os.pipe()
    command = [sys.executable, "-u", "-m", "nri_gpu", "gpus", "--gpus", str(FOUR_GPUS), "-o", "json"]
    process = subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    if lines:
        assert os.read(reading, 10)
    os.close(reading)
    _, error = process.communicate(timeout=20)
    assert error == b""
    assert process.returncode == Exit.OK


def test_as_a_module_and_as_a_command(tmp_path: Path) -> None:
    for command in ([sys.executable, "-m", "nri_gpu"], [str(Path(sys.executable).with_name("nri-gpu"))]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout == f"nri-gpu {__version__}\n"
