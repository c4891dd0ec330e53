"""What an observer reads of the policy, and that no file keeps it from observing."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from nri_gpu.domain.errors import PolicyError
from nri_gpu.observe.observe_policy import READ, ObservePolicy
from nri_gpu.policy.model import Policy
from tests.support.log import Log

NOT_TAKEN = "policy not taken, observing goes on"
GOOD = """
[observe]
xids = true
look_s = 120
[foreign]
monitors = ["monitoring/dcgm-*"]
complete = "none"
[stray]
exceptions = ["/usr/bin/Xorg"]
enabled = true
[control]
group = "video"
[plugin]
index = "20"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "policy.toml"


def read(file: Path) -> ObservePolicy:
    policy = ObservePolicy(file, {})
    policy.read()
    return policy


def test_it_takes_what_concerns_it_and_no_more(file: Path, log: Log) -> None:
    file.write_text(GOOD)
    policy = read(file).policy
    assert (policy.observe.xids, policy.observe.look_s, policy.control.group) == (True, 120, "video")
    assert policy.foreign.monitors.patterns == ("monitoring/dcgm-*",)
    assert policy.stray.exceptions.patterns == ("/usr/bin/Xorg",)
    default = Policy.default()
    assert (policy.plugin, policy.stray.enabled, policy.source) == (default.plugin, False, str(file))
    assert not log.lines


def test_a_fault_is_an_error_and_the_last_good_policy_stays(file: Path, log: Log) -> None:
    file.write_text(GOOD)
    policy = read(file)
    before, digest = policy.policy, policy.status.digest
    assert digest == sha256(GOOD.encode()).hexdigest()
    file.write_text("[observe]\nlook_s = 1\nxid = true\n")
    policy.read()
    assert (policy.policy, policy.status.digest) == (before, digest)
    assert [line.level for line in log.said(NOT_TAKEN)] == ["ERROR", "ERROR"]
    assert (policy.status.rejected, policy.status.fault) == (log.said(NOT_TAKEN)[0].fields["fault"], "")
    file.write_text(GOOD.replace("120", "240"))
    policy.read()
    assert (policy.policy.observe.look_s, policy.status.rejected) == (240, "")


@pytest.mark.parametrize("text", ["not toml", "observe = 3", "[observe]\nlook_s = 'a'", "\0", None])
def test_without_a_good_file_every_default_holds(file: Path, text: str | None) -> None:
    if text is not None:
        file.write_text(text)
    policy = read(file)
    assert policy.policy == Policy.default()
    assert str(file) in policy.status.rejected


def test_a_fault_of_another_section_is_a_note(file: Path, log: Log) -> None:
    """A rule of the allocator's that is wrong grants nobody anything here."""
    file.write_text(f"{GOOD}\nnonsense = 1\n[[rule]]\nallow = 3\n")
    policy = read(file)
    assert (policy.policy.observe.look_s, policy.status.rejected) == (120, "")
    assert "nonsense" in log.one("policy has a fault that does not concern an observer").fields["fault"]


def test_the_metrics_are_the_loopbacks_here_too(file: Path) -> None:
    file.write_text('[metrics]\nlisten = "0.0.0.0:9464"\n')
    assert "metrics.public" in read(file).status.rejected


def test_an_option_that_is_wrong_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"kubelet\.podresources"):
        ObservePolicy(None, {"kubelet.podresources": "here"})


def test_each_setting_that_is_read_there_is() -> None:
    default = Policy.default()
    assert all(hasattr(getattr(default, name), key) for name, keys in READ.items() for key in keys)
