"""What a finding about the policy has an operator do."""

from __future__ import annotations

from nri_gpu.domain.finding import in_policy

THEN = "nri-gpu check && systemctl reload nri-gpu"


def test_the_lines_of_a_setting_whose_value_is_known_or_not() -> None:
    known = in_policy("and so on", "kubelet.inject_for", '["a/b"]').fix
    assert known == ("# in /etc/nri-gpu/policy.toml:", 'inject_for = ["a/b"]    # below [kubelet]', THEN)
    assert in_policy("and so on", "driver.root").fix == (
        "# change driver.root in /etc/nri-gpu/policy.toml, then:",
        THEN,
    )
