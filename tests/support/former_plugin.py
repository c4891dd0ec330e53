"""NVIDIA's device plugin, as it answered Allocate before ours took its resource over: recorded answers, played back.

No registry serves that program, so its answers are data (tests/fixtures/nvidia-device-plugin.json, which says of which
version, and how). A kubelet keeps an answer for the life of its pod, and makes each start of a container of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.container import Container
from tests.support import builders
from tests.support.pods import ContainerSpec

RECORDED: Final = Path(__file__).parents[1] / "fixtures/nvidia-device-plugin.json"


class Mount(Struct, frozen=True):
    container_path: str
    host_path: str


class DeviceSpec(Struct, frozen=True):
    container_path: str
    host_path: str
    permissions: str


class CdiDevice(Struct, frozen=True):
    name: str


class AllocateAnswer(Struct, frozen=True):
    """A ContainerAllocateResponse."""

    envs: Mapping[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceSpec, ...] = ()
    annotations: Mapping[str, str] = {}
    cdi_devices: tuple[CdiDevice, ...] = ()


class Recorded(Struct, frozen=True):
    """What was recorded. ids: the devices that the kubelet asked for, as PodResources lists them ever after."""

    arguments: tuple[str, ...]
    resource: str
    ids: tuple[str, ...]
    answer: AllocateAnswer
    config: Mapping[str, Any] = {}

    def container(self, pod: str = "train", **fields: object) -> Container:
        """The container as NRI shows it, without what CDI would add to it."""
        made = replace(
            builders.container(of=pod),
            env=dict(self.answer.envs),
            mounts=frozenset(each.container_path for each in self.answer.mounts),
        )
        return replace(made, **fields)

    def spec(self, **fields: Any) -> ContainerSpec:  # noqa: ANN401 - any field of it
        """The container as the kubelet asks the runtime for it."""
        made = ContainerSpec(
            env=self.answer.envs,
            annotations=self.answer.annotations,
            mounts={each.container_path: each.host_path for each in self.answer.mounts},
            cdi_devices=tuple(each.name for each in self.answer.cdi_devices),
        )
        return replace(made, **fields)


ANSWERS: Final = msgspec.convert(json.loads(RECORDED.read_text())["answers"], dict[str, Recorded])
