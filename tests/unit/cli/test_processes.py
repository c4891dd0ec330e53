"""`nri-gpu status --processes`: a table of its own, or a document of its own, for root alone."""

from __future__ import annotations

import pytest

from nri_gpu.cli.page import plain
from nri_gpu.cli.processes_page import processes_lines
from nri_gpu.daemon.answers import DaemonStatus, ProcessesAnswer, ProcessStatus
from nri_gpu.daemon.view import processes_of, status_of
from nri_gpu.domain.container import ContainerId, PodId
from nri_gpu.domain.errors import Exit
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.system.node_name import NamedNode
from nri_gpu.usage.sampled_processes import UNTOLD, KnownProcess
from nri_gpu.usage.usage_controller import SampledUse, Usages
from tests.support import builders as make
from tests.support.views import view
from tests.unit.cli.conftest import NriGpuCall

ID = ContainerId("ab" * 32)
NODE = NamedNode("node1")
STATUS: DaemonStatus = status_of(view())
TRAIN = ProcessStatus(
    gpu_uuid=make.uuid(0),
    pid=41,
    uid=0,
    comm="python3",
    memory_bytes=3 * 2**30,
    container_id=ID,
    namespace="ml",
    pod="train",
    container="main",
)
HOST = ProcessStatus(gpu_uuid=make.uuid(1), pid=7, uid=4_000_000_000, comm="Xorg", memory_bytes=None)


def rows(answer: ProcessesAnswer) -> list[list[str]]:
    return [line.split() for line in plain([*processes_lines(answer, STATUS)]).splitlines() if line]


def test_the_table() -> None:
    assert rows(ProcessesAnswer(NODE, (TRAIN, HOST))) == [
        ["GPU", "PID", "USER", "COMM", "MEMORY", "POD", "CONTAINER"],
        ["0", "41", "root", "python3", "3,072", "MiB", "ml/train", "main"],
        ["1", "7", "4000000000", "Xorg", "-", "-", "-"],
    ]


def test_what_may_be_missing_is_said() -> None:
    text = plain([*processes_lines(ProcessesAnswer(NODE, (), UNTOLD), STATUS)])
    assert "no process on a GPU" in text
    assert f"processes: some may be missing: {UNTOLD}" in text


def test_the_pod_is_that_of_the_runtimes_list() -> None:
    uses = [
        SampledUse(gpu_uuid=make.uuid(0), process=KnownProcess(pid, 1, 0, "a", ()), memory_bytes=5, container_id=id_)
        for pid, id_ in ((1, ID), (2, ContainerId("cd" * 32)), (3, None))
    ]
    listed = {ID: ListedContainer(PodId("1"), "ml", "train", "main", privileged=False)}
    found = processes_of(uses, Usages(fault="why"), listed)
    assert [(each.pod, each.container_id[:2]) for each in found.processes] == [("train", "ab"), ("", "cd"), ("", "")]
    assert found.fault == "why"


@pytest.mark.parametrize("other", ["--watch", "--alive", "--probe", "--guard=/run/x"])
def test_it_goes_with_no_other_answer(nri_gpu: NriGpuCall, other: str) -> None:
    assert nri_gpu("status", "--processes", other).code == Exit.USAGE
