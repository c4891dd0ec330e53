"""Files with which a release of containerd does not start: a warning while it runs, an error once it has ended.

What the releases at hand read is tried in tests/conformance/test_doctor_settings.py.
"""

from __future__ import annotations

import pytest

from nri_gpu.doctor.runtime_settings import containerd_settings
from nri_gpu.domain.finding import Finding, Level
from tests.unit.doctor.node import CONFIG, TOML, DoctorNode, stopped

CRI = '[plugins."io.containerd.cri.v1.runtime".containerd]\ndefault_runtime_name = "nvidia"\n'
IMPORTING = 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
SUBJECT = "runtime configuration"


def the_issues(node: DoctorNode, release: str = "2.3.2") -> None:
    """AKS after the GPU Operator's toolkit was installed."""
    node.program(release)
    node.write(TOML, IMPORTING)
    node.write("etc/containerd/conf.d/99-nvidia.toml", f"version = 4\n{CRI}")


def advised(found: dict[str, Finding]) -> str:
    return "\n".join(line for each in found.values() for line in each.fix)


def test_while_it_still_runs(node: DoctorNode) -> None:
    the_issues(node)
    found = node.found()
    assert found[SUBJECT].level is Level.WARNING
    assert "/etc/containerd/conf.d/99-nvidia.toml is of version 4" in found[SUBJECT].meaning
    assert "containerd 2.3.2 does not start. It runs with the file it read before" in found[SUBJECT].meaning
    assert "for version 2" in found[SUBJECT].fix[0]
    assert "default runtime" in found
    assert "restart containerd" not in advised(found)


def test_nothing_else_says_restart(node: DoctorNode) -> None:
    node.program("1.7.22")
    node.write(TOML, CONFIG)
    node.remove("run/nri/nri.sock")
    node.dead_socket("var/lib/kubelet/device-plugins/kubelet.sock")
    node.write("var/lib/kubelet/config.yaml", "cgroupDriver: systemd\n")
    found = node.found()
    assert found[SUBJECT].level is Level.WARNING
    assert {"NRI", "cgroup driver", "kubelet"} <= found.keys()
    assert "restart" not in advised(found)
    assert not any("restart" in each.meaning for each in found.values())


@pytest.mark.parametrize("release", ["1.7.22", "2.3.2"])
def test_once_it_has_ended(node: DoctorNode, release: str) -> None:
    the_issues(node, release)
    node.remove("proc/700/comm")
    found = node.found(status=None)
    assert found[SUBJECT].level is Level.ERROR
    assert "does not run, and cannot with its configuration" in found["container runtime"].meaning
    assert "enable --now containerd" not in advised(found)


def test_files_that_are_read_stay_as_they_were(node: DoctorNode) -> None:
    the_issues(node, "2.3.5")
    assert SUBJECT not in node.found()
    node.remove("etc/containerd/conf.d/99-nvidia.toml")
    stopped(node)
    assert "enable --now containerd" in advised(node.found(status=None))


@pytest.mark.parametrize(
    ("release", "main", "imported", "starts"),
    [
        ((1, 6, 31), 3, 0, True),
        ((1, 6, 32), 3, 0, False),
        ((1, 7, 16), 3, 0, True),
        ((1, 7, 17), 3, 0, False),
        ((1, 7, 22), 3, 2, True),
        ((2, 0, 0), 4, 0, False),
        ((2, 2, 1), 2, 3, True),
        ((2, 2, 1), 4, 3, True),
        ((2, 3, 0), 2, 3, False),
        ((2, 3, 4), 3, 2, True),
        ((2, 3, 4), 4, 5, False),
        ((2, 3, 5), 2, 4, True),
        ((2, 4, 0), 5, 2, False),
        (None, 9, 9, True),
    ],
)
def test_the_table(
    node: DoctorNode, release: tuple[int, ...] | None, main: int, imported: int, *, starts: bool
) -> None:
    """0: a file without a version."""
    node.write(TOML, f'version = {main}\nimports = ["b.toml"]\n')
    node.write("etc/containerd/b.toml", f"version = {imported}\n" if imported else "")
    assert (containerd_settings(node.root, f"/{TOML}", release).faults == ()) is starts


def test_more_files_than_are_read(node: DoctorNode) -> None:
    node.write(TOML, IMPORTING.replace("2", "3"))
    for number in range(70):
        node.write(f"etc/containerd/conf.d/{number}.toml", "")
    finding = node.only()
    assert (finding.level, "more than 64 files" in finding.meaning) == (Level.UNSEEN, True)
