"""A node, its containers and who uses its GPUs, for tests of what is made of them."""

from __future__ import annotations

from nri_gpu.domain.container import Container, ContainerId, DeviceNumber
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.stray.uses import Use
from tests.support import builders as make

ID, OTHER_ID = ContainerId("ab" * 32), ContainerId("cd" * 32)
TRAIN = make.container(of="train", id=ID)
INVENTORY = make.inventory([make.gpu(0), make.gpu(1), make.mig_gpu(2)])
CTL, UVM = (195, 255), (511, 0)


def number(index: int) -> DeviceNumber:
    """Of a GPU's node."""
    return 195, INVENTORY.gpus[index].minor_number


def capability(place: int) -> DeviceNumber:
    """Of a MIG device's node, on GPU 2."""
    minor = INVENTORY.gpus[2].mig[place].compute_instance_minor
    assert minor is not None
    return 510, minor


def use(*numbers: DeviceNumber, cgroup: str = f"/kubepods/pod1/{ID}", pid: int = 7, program: str = "/bin/train") -> Use:
    return Use(pid, 100 * pid, program, (cgroup,), numbers)


def listed(of: Container = TRAIN, *, privileged: bool = False) -> dict[ContainerId, ListedContainer]:
    return {of.id: ListedContainer(of.pod.id, of.pod.namespace, of.pod.name, of.name, privileged)}
