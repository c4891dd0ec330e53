"""The policy file on disk: read with suspicion, kept whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nri_gpu.daemon import policy_file as settings
from nri_gpu.daemon.policy_file import (
    LAST_GOOD,
    POLICY_MAX,
    build_policy,
    file_advice,
    keep_last_good,
    load_last_good,
    load_policy,
    read_policy,
)
from nri_gpu.domain.errors import Fault, PolicyError
from nri_gpu.policy.model import BUILT_IN, Policy
from nri_gpu.policy.select import Denied, select
from tests.support import builders as make


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "policy.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def faults(path: Path | None, overrides: dict[str, object] | None = None) -> tuple[Fault, ...]:
    with pytest.raises(PolicyError) as caught:
        load_policy(path, overrides)
    return caught.value.faults


def fault(path: Path) -> Fault:
    (only,) = faults(path)
    return only


def test_a_file_is_read_and_named(tmp_path: Path) -> None:
    path = written(tmp_path, '[plugin]\nindex = "20"\n')
    policy = load_policy(path)
    assert policy.plugin.index == "20"
    assert policy.source == str(path)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_policy(written(tmp_path, "")) == Policy.default()


def test_without_the_default_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_PATH", tmp_path / "missing.toml")
    policy = load_policy(None, {"plugin.index": "30"})
    assert policy.plugin.index == "30"
    assert policy.source == BUILT_IN


def test_the_default_file_is_read_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_PATH", written(tmp_path, "x = 1"))
    assert faults(None)[0].key == "x"


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "missing.toml").message


def test_options_go_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, '[plugin]\nsocket = "/a"\nindex = "20"\n')
    policy = load_policy(path, {"plugin.socket": "/b", "plugin.index": None})
    assert (policy.plugin.socket, policy.plugin.index) == ("/b", "20")


def test_faults_of_the_file_and_of_options_come_together(tmp_path: Path) -> None:
    path = written(tmp_path, "# comment\n\n[plugin]\nindex = 5\n")
    assert [str(each) for each in faults(path, {"plugin.socket": "b", "plugin.index": "20"})] == [
        f"{path}:4: plugin.index: must be a string, not an integer",
        'command line: --socket: must be an absolute path to a socket without blanks, "." or "..", not "b"',
    ]


def test_an_option_does_not_hide_a_fault_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[plugin]\nindex = 5\n")
    assert [each.key for each in faults(path, {"plugin.index": "20"})] == ["plugin.index"]


SYNTAX = {
    "no value": ("a = 1\nb =\n", 2, "not TOML: invalid value"),
    "at the end of the file": ('a = 1\nb = "', 2, "not TOML: unterminated string"),
    "key twice": ("a = 1\na = 2\n", 2, "not TOML: cannot overwrite a value"),
    "section twice": ("[a]\n[a]\n", 2, "not TOML: cannot declare"),
    "byte order mark": ("\ufeffa = 1\n", 1, "not TOML: invalid statement"),
    "a number of thousands of digits": ("a = " + "1" * 5000, None, "not TOML: exceeds the limit"),
    "deep nesting": ("a = " + "[" * 50_000, None, "nested too deeply"),
    "NUL": ("a = \x00", 1, "not TOML: "),
}


@pytest.mark.parametrize(("text", "line", "sentence"), SYNTAX.values(), ids=SYNTAX.keys())
def test_syntax_errors_are_faults_with_their_line(tmp_path: Path, text: str, line: int | None, sentence: str) -> None:
    found = fault(written(tmp_path, text))
    assert sentence in found.message
    assert found.line == line
    assert str(found).isprintable()


def test_not_utf8(tmp_path: Path) -> None:
    assert fault(written(tmp_path, b"a = '\xff'")).message == "is not UTF-8: byte 6 is 0xff"


def test_too_long(tmp_path: Path) -> None:
    assert "longer than" in fault(written(tmp_path, b"#" * (POLICY_MAX + 1))).message
    assert load_policy(written(tmp_path, b"#" * POLICY_MAX)) == Policy.default()


THOUSANDS = 4000


def test_thousands_of_rules(tmp_path: Path) -> None:
    rules = (f'[[rule]]\nnamespace = "ns-{n}-*"\npod = "*-{n}"\nallow = false\n' for n in range(THOUSANDS))
    policy = load_policy(written(tmp_path, "".join(rules)))
    for number in (0, THOUSANDS - 1):
        verdict = select(policy, make.container(of=make.pod(f"p-{number}", namespace=f"ns-{number}-x")))
        assert isinstance(verdict, Denied)
        assert f"rule[{number}]" in str(verdict)


def test_thousands_of_rules_that_are_all_wrong_each_have_their_line(tmp_path: Path) -> None:
    found = faults(written(tmp_path, "[[rule]]\nallow = 'perhaps'\n" * THOUSANDS))
    assert [each.line for each in found] == [2 * (n + 1) for n in range(THOUSANDS)]


def test_a_folder_is_no_policy(tmp_path: Path) -> None:
    assert "not a regular file" in fault(tmp_path).message


def test_a_fifo_does_not_hold_us(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in fault(tmp_path / "fifo").message


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    assert "cannot be read: Too many levels" in fault(tmp_path / "a").message


def test_a_file_we_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    path = written(tmp_path, "")
    monkeypatch.setattr(os, "open", refuse)  # the tests may run as root, who may read everything
    assert fault(path).message == f"user {os.geteuid()} may not read it"


def test_the_last_good_policy_comes_back(tmp_path: Path) -> None:
    source = read_policy(written(tmp_path, '[plugin]\nname = "caf"\n# \u20ac \r\n'))
    assert source is not None
    keep_last_good(tmp_path, source.text)
    assert (tmp_path / LAST_GOOD).read_bytes() == source.text.encode()
    kept = load_last_good(tmp_path, {"plugin.index": "11"})
    assert kept is not None
    assert (kept.plugin.name, kept.plugin.index) == ("caf", "11")
    assert kept.source == str(tmp_path / LAST_GOOD)


def test_keeping_is_private_replaces_the_older_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / f".{LAST_GOOD}.new").write_text("left by a crash")
    keep_last_good(tmp_path, "# one")
    keep_last_good(tmp_path, "# two")
    path = tmp_path / LAST_GOOD
    assert path.read_text() == "# two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_keeping_does_not_follow_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".{LAST_GOOD}.new").symlink_to(victim)
    (tmp_path / LAST_GOOD).symlink_to(victim)
    keep_last_good(tmp_path, "# policy")
    assert victim.read_text() == "mine"
    assert not (tmp_path / LAST_GOOD).is_symlink()


def test_nothing_kept_is_nothing(tmp_path: Path) -> None:
    assert load_last_good(tmp_path) is None
    assert load_last_good(tmp_path / "missing") is None


def test_a_kept_policy_that_no_longer_passes_says_so(tmp_path: Path) -> None:
    keep_last_good(tmp_path, "schema = 0")
    with pytest.raises(PolicyError, match=LAST_GOOD):
        load_last_good(tmp_path)


def test_a_text_already_read_is_built_without_the_disk(tmp_path: Path) -> None:
    path = written(tmp_path, '[plugin]\nindex = "20"\n')
    source = read_policy(path)
    path.unlink()
    assert build_policy(source).plugin.index == "20"


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o644, False), (0o664, True), (0o646, True)])
def test_a_file_others_may_write_is_warned_of(tmp_path: Path, mode: int, warned: bool) -> None:
    path = written(tmp_path, "")
    path.chmod(mode)
    assert bool(file_advice(path)) is warned


def test_a_missing_file_is_not_warned_of(tmp_path: Path) -> None:
    assert file_advice(tmp_path / "missing") == ()
