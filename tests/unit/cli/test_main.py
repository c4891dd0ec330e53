"""The command line: what each verb takes, what help teaches, and which code comes out."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import pytest

from nri_gpu import __version__
from nri_gpu.cli import check_command, gpus_command
from nri_gpu.cli import main as cli
from nri_gpu.cli.installed import here
from nri_gpu.daemon import logs
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.policy.document import SECTIONS, options_in, setting
from nri_gpu.policy.forms import settings_of
from tests.support.daemon import FOUR_GPUS
from tests.support.nvml import FakeGpu, build_fake_nvml

SWITCHES = {"--kubelet", "--dra", "--metrics-public"}
VERBS = [verb.name for verb in cli.VERBS]
NOBODY = 65534


def called(*arguments: str) -> int | str | None:
    """The exit code, be it returned or raised, as argparse does."""
    try:
        return cli.main(arguments)
    except SystemExit as ended:
        return ended.code


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert called(*arguments, "--help") == Exit.OK
    text = capsys.readouterr().out
    assert called("help", *arguments) == Exit.OK
    assert capsys.readouterr() == (text, "")
    return text


def test_help_has_every_verb_in_its_group_with_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "run guard dra observe gpus status history usage repaired cordon uncordon verify blockers driver check doctor "
        "cdi explain replay try prepare enable disable"
    )
    assert names.split() == VERBS
    assert sorted(name for group in cli.GROUPS.values() for name in group) == sorted(VERBS)
    monkeypatch.setenv("COLUMNS", "80")
    text = helped(capsys)
    lines = text.splitlines()
    flat = " ".join(text.split())
    assert all(f"{verb.name} {verb.help} $ {here(verb.example)}" in flat for verb in cli.VERBS)
    starts = [lines.index(f"{group}:") for group in cli.GROUPS]
    assert starts == sorted(starts)
    assert 'gpu.nri.io: "2"' in flat
    assert "78 configuration" in text
    assert all(len(line) <= 80 or line.lstrip().startswith(("$", "0 ok")) for line in lines)


@pytest.mark.parametrize("verb", cli.VERBS, ids=VERBS)
def test_each_example_is_a_command_line(verb: cli.Verb) -> None:
    prog, name, *words = verb.example.partition(" && ")[0].split()
    assert (prog, name) == ("nri-gpu", verb.name)
    cli.parse(name, *words)


def test_nothing_asked_shows_the_help_and_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NRI_PLUGIN_SOCKET", raising=False)
    text = helped(capsys)
    assert called() == Exit.USAGE
    assert capsys.readouterr() == ("", text)


@pytest.mark.parametrize("word", ["version", "-V", "--version"])
def test_each_spelling_of_version(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert called(word) == Exit.OK
    assert capsys.readouterr().out == f"nri-gpu {__version__}\n"


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
    assert all(line in text for line in here(declared.teach).splitlines())
    assert f"man nri-gpu-{verb}; man nri-gpu-request" in text
    assert "exit codes" in text
    assert all(len(line) <= 160 for line in text.splitlines())


@pytest.mark.parametrize("verb", ["run", "check"])
def test_every_option_over_the_policy_is_one_of_run_and_of_check(verb: str) -> None:
    settings = [setting(f"{section}.{key}") for section, cls in SECTIONS.items() for key in settings_of(cls)]
    flags = {each.flag for each in settings if each.flag}
    declared = {name for each in cli.VERBS if each.name == verb for names, _ in each.options for name in names}
    assert {names[0] for names, _ in cli.OVERRIDES} == flags <= declared
    words = [f"{flag}=a" if flag not in SWITCHES else flag for flag in flags]
    args = vars(cli.parse(verb, *words))
    assert {setting(path).flag for path in options_in(args)} == flags
    assert options_in(vars(cli.parse(verb))) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dance"], 'nri-gpu: no verb "dance": see `nri-gpu --help`'),
        (["statsu"], 'no verb "statsu" (did you mean "status"?)'),
        (["help", "stat"], 'no verb "stat" (did you mean "status"?)'),
        (["--policy", "x", "check"], 'no verb "--policy"'),
        (["gpus", "--fast"], "unrecognized arguments: --fast: see `nri-gpu gpus --help`"),
        (["check", "--forgt"], 'unrecognized arguments: --forgt (did you mean "--forget"?)'),
        (["explain", "--polcy=x"], 'unrecognized arguments: --polcy=x (did you mean "--policy"?)'),
        (["run", "--no-kubelt"], '(did you mean "--no-kubelet"?)'),
        (["check", "--", "--forgt", "b"], "unrecognized arguments: b"),
        (["gpus", "-o", "yaml"], "invalid choice: 'yaml'"),
        (["explain"], "required: POD.yaml"),
        (["run", "--log-level", "loud"], "invalid choice: 'LOUD'"),
    ],
)
def test_wrong_usage_is_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.delenv("NRI_PLUGIN_SOCKET", raising=False)
    assert called(*arguments) == Exit.USAGE
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n"), words in captured.err) == ("", 1, True)


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
    "from nri_gpu.cli import main; main.parse('run'); main._help()": (
        "nri_gpu.daemon",
        "nri_gpu.cli.run_command",
        *FOREIGN,
    ),
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


# What names a file, which comes last; and whether one without a byte is good.
INPUTS = {
    "a policy": (("driver", "--policy"), True),
    "a policy to check": (("check",), True),
    "another policy for a log": (("replay", os.devnull, "--policy"), True),
    "a topology": (("gpus", "--gpus"), False),
    "a topology for a specification": (("cdi", "generate", "--gpus"), False),
    "a topology to compare with": (("check", "--gpus"), False),
    "a pod": (("explain", "--gpus", str(FOUR_GPUS)), False),
    "an audit log": (("replay",), True),
}


def missing(file: Path) -> None:
    assert not file.exists()


def rubbish(file: Path) -> None:
    file.write_bytes(b"\x00\xff\xfe\n" * 4)


BAD = {
    "missing": (missing, Exit.CONFIGURATION),
    "a folder": (Path.mkdir, Exit.CONFIGURATION),
    "a pipe": (lambda file: os.mkfifo(file), Exit.CONFIGURATION),
    "rubbish": (rubbish, Exit.CONFIGURATION),
    "empty": (Path.touch, Exit.CONFIGURATION),
    "not for us": (lambda file: file.touch(0o000), Exit.PERMISSION),
}


@pytest.mark.parametrize(("make", "code"), BAD.values(), ids=BAD)
@pytest.mark.parametrize(("words", "may_be_empty"), INPUTS.values(), ids=INPUTS)
def test_a_bad_input_file_is_a_sentence_with_its_name_and_78_or_77(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    may_be_empty: bool,
    make: Callable[[Path], object],
    code: Exit,
) -> None:
    monkeypatch.setattr("nri_gpu.records.policy_file.DEFAULT_PATH", tmp_path / "no-policy.toml")
    file = tmp_path / "input"
    make(file)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    os.seteuid(NOBODY if code is Exit.PERMISSION else 0)
    try:
        ended = called(*words, str(file))
    finally:
        os.seteuid(0)
    printed = "".join(capsys.readouterr())
    assert "Errno" not in printed
    assert "Traceback" not in printed
    if may_be_empty and (make is Path.touch or (make is BAD["a pipe"][0] and words == ("replay",))):
        assert ended != code
        return
    assert (ended, str(file) in printed) == (code, True), printed
    assert make is not missing or f"{file}: no such file\n" in printed


def in_shell(line: str) -> subprocess.CompletedProcess[str]:
    script = f'nri-gpu() {{ {quote(sys.executable)} -m nri_gpu "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=False)


GPUS = f"nri-gpu gpus --gpus {quote(str(FOUR_GPUS))}"
STREAMS = {
    "no stdout": (f"{GPUS} >&-", Exit.OK, ""),
    "no stderr": (f"{GPUS} 2>&- >/dev/null", Exit.OK, ""),
    "no stderr for a fault": ("nri-gpu gpus --gpus /none 2>&-", Exit.CONFIGURATION, ""),
    "none at all": ("nri-gpu <&- >&- 2>&-", Exit.USAGE, ""),
    "a full disk": (f"{GPUS} -o json >/dev/full", Exit.UNAVAILABLE, "nri-gpu: the output cannot be written: No space"),
    "a full disk for the help": ("nri-gpu help >/dev/full", Exit.UNAVAILABLE, "nri-gpu: the output cannot be written"),
    "a reader of the help who has enough": ("set -o pipefail; nri-gpu help run | true", Exit.OK, ""),
    "20 columns": ("COLUMNS=20 LC_ALL=C nri-gpu help >/dev/null", Exit.OK, ""),
}


@pytest.mark.parametrize(("line", "code", "words"), STREAMS.values(), ids=STREAMS)
def test_streams_that_are_closed_or_full(line: str, code: Exit, words: str) -> None:
    done = in_shell(line)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == bool(words)
