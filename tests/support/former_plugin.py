"""NVIDIA's device plugin, as it answered Allocate before ours took its resource over: recorded answers, played back.

No registry serves that program, so its answers are data (tests/fixtures/nvidia-device-plugin.json, which says of which
version, and how). A kubelet keeps an answer for the life of its pod, and makes each start of a container of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import ParseDict
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.container import Container
from tests.support import builders
from tests.support._pb.deviceplugin_tests_pb2 import ContainerAllocateResponse
from tests.support.pods import ContainerSpec

RECORDED: Final = Path(__file__).parents[1] / "fixtures/nvidia-device-plugin.json"


class Recorded(Struct, frozen=True):
    """What was recorded. ids: the devices that the kubelet asked for, as PodResources lists them ever after."""

    arguments: Sequence[str]
    resource: str
    ids: Sequence[str]
    answer: ContainerAllocateResponse
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
            env=dict(self.answer.envs),
            annotations=dict(self.answer.annotations),
            mounts={each.container_path: each.host_path for each in self.answer.mounts},
            cdi_devices=tuple(each.name for each in self.answer.cdi_devices),
        )
        return replace(made, **fields)


def _recorded(answer: dict[str, Any], **fields: Any) -> Recorded:  # noqa: ANN401 - of a JSON document
    return Recorded(answer=ParseDict(answer, ContainerAllocateResponse()), **fields)


ANSWERS: Final = {name: _recorded(**each) for name, each in json.loads(RECORDED.read_text())["answers"].items()}
