"""What both demos share: how they are run, and what they print."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from tests.support.containerd import Containerd
from tests.support.cri import CriError
from tests.support.daemon import NriGpu
from tests.support.errors import HarnessError

WIDTH: Final = 24
_START: Final = time.monotonic()


def run(command: str, demonstrate: Callable[[ExitStack], None]) -> int:
    """Run a demo, and take away what it made. Returns an exit code."""
    if os.geteuid():
        print(f"{command} boots a containerd and needs root: run `sudo {command}`")
        return 77
    try:
        with ExitStack() as stack:
            demonstrate(stack)
    except HarnessError as error:
        print(f"\nThe demo could not go on: {error}", file=sys.stderr)
        return 1
    return 0


def step(text: str) -> None:
    print(f"\n[{time.monotonic() - _START:5.1f} s] {text}", flush=True)


def lines(head: str, body: Sequence[str]) -> None:
    for number, line in enumerate(body):
        print(f"    {head if number == 0 else '':{WIDTH}}{line}")


def container(name: str, annotations: Mapping[str, str]) -> None:
    asked = ", ".join(f"{key}: {value!r}" for key, value in annotations.items()) or "no annotation"
    print(f"\n  pod {name}    {asked}")


def refused(node: Containerd, value: str) -> None:
    """A pod that asks for what it cannot have, and what it is told."""
    pod = node.cri.asking(value, "choosy")
    sentence = "CREATED: that must never happen"
    try:
        node.cri.create(pod)
    except CriError as error:
        sentence = error.details.rpartition("desc = ")[2]
    node.cri.remove_pod(pod.id)
    print(f"    {'gpu.nri.io: ' + value}\n      -> {sentence}")


def gpus(daemon: NriGpu) -> list[str]:
    """The node's GPUs, as `nri-gpu gpus` tells; their UUIDs."""
    found = daemon.gpus()
    for gpu in found["gpus"]:
        lines(f"GPU {gpu['index']}", [f"{gpu['model']}  {gpu['uuid']}"])
    if found["simulated"]:
        lines("", ["(simulated by config/topologies/four-gpus.toml: this machine has no NVIDIA driver)"])
    return [gpu["uuid"] for gpu in found["gpus"]]


def ledger(daemon: NriGpu, uuids: Sequence[str]) -> None:
    step("The ledger: who holds which GPU")
    grants = daemon.ledger()["grants"]
    for index, uuid in enumerate(uuids):
        holders = [f"{grant['namespace']}/{grant['pod']}" for grant in grants if uuid in grant["gpu_uuids"]]
        lines(f"GPU {index}", [f"{len(holders)} x shared: {', '.join(holders)}" if holders else "free"])
