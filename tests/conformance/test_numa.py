"""Containers kept near their GPUs: what the kernel's cpuset says, on both containerds.

On the machine's own cgroups only: its cpuset controller cannot be in two generations at once.
"""

import os
import re

import pytest
from msgspec.structs import replace

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import FOUR_GPUS, Launch

pytestmark = [pytest.mark.containerd, pytest.mark.usefixtures("shared_daemon")]

CPUS = sorted(os.sched_getaffinity(0))
FIRST, LAST = str(CPUS[0]), str(CPUS[-1])


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch) -> Launch:
    """GPUs 0 and 1 are near this machine's first CPU; those of 2 and 3 it has not."""
    topology = module_launch.base.with_name("near.toml")
    topology.write_text(re.sub(r'cpus = "0-31,64-95"', f'cpus = "{FIRST}"', FOUR_GPUS.read_text()))
    return replace(module_launch, topology=topology).with_policy('[placement]\nnuma = "both"\n')


def cpuset(node: Containerd, container: ContainerId) -> tuple[str, str]:
    folder = node.container_cgroup(container, "cpuset")
    return (folder / "cpuset.cpus").read_text().strip(), (folder / "cpuset.mems").read_text().strip()


@pytest.mark.short
def test_a_container_is_kept_to_the_cpus_and_memory_of_its_gpus(node: Containerd) -> None:
    container = node.cri.run_asking("2")
    assert cpuset(node, container) == (FIRST, "0")
    seen = node.cri.execute(container, "grep", "allowed_list", "/proc/self/status").stdout.split()
    assert seen == ["Cpus_allowed_list:", FIRST, "Mems_allowed_list:", "0"]


def test_who_has_a_cpuset_keeps_it(node: Containerd) -> None:
    container = node.cri.run_asking("device=0", cpuset_cpus=LAST)
    assert cpuset(node, container)[0] == LAST


def test_who_asks_for_nothing_is_left_alone(node: Containerd) -> None:
    container = node.cri.run_asking("none")
    assert cpuset(node, container)[0] == (FIRST if FIRST == LAST else f"{FIRST}-{LAST}")
