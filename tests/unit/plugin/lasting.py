"""Processes that outlive their containers."""

from __future__ import annotations

from nri_gpu.domain.container import ContainerId, FirstProcess
from nri_gpu.system.cgroups import ContainerCgroups


class Cgroups(ContainerCgroups):
    """Of containers that all have the same processes. left: how many. asked: for whose first process."""

    def __init__(self) -> None:
        super().__init__(same_pids=False)
        self.left = 2
        self.asked: list[str] = []

    def first_process(self, pid: int, container_id: ContainerId) -> FirstProcess | None:
        self.asked.append(container_id)
        return FirstProcess(pid, 1) if pid else None

    def lives(self, process: FirstProcess) -> bool:
        return self.left > 0

    def pids(self, process: FirstProcess, most: int) -> tuple[int, ...]:
        return tuple(range(100, 100 + self.left))
