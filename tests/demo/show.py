"""What both demos share: how they are run, and what they print."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from nri_gpu.cli import render
from nri_gpu.cli.page import Line, Tone
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
    told("", f"[{time.monotonic() - _START:5.1f} s] {text}", tone=Tone.HEAD)


def told(*texts: str, tone: Tone = Tone.PLAIN) -> None:
    """Lines, in that tone on a terminal."""
    render.show([Line(text, tone) for text in texts])
    sys.stdout.flush()


def lines(head: str, body: Sequence[str], tone: Tone = Tone.PLAIN) -> None:
    told(*(f"    {head if number == 0 else '':{WIDTH}}{line}" for number, line in enumerate(body)), tone=tone)


def container(name: str, annotations: Mapping[str, str]) -> None:
    asked = ", ".join(f"{key}: {value!r}" for key, value in annotations.items()) or "no annotation"
    told("", f"  pod {name}    {asked}", tone=Tone.LINK)


def refused(node: Containerd, value: str) -> None:
    """A pod that asks for what it cannot have, and what it is told."""
    pod = node.cri.asking(value, "choosy")
    sentence = "CREATED: that must never happen"
    try:
        node.cri.create(pod)
    except CriError as error:
        sentence = error.details.rpartition("desc = ")[2]
    node.cri.remove_pod(pod.id)
    told(f"    gpu.nri.io: {value}")
    told(f"      -> {sentence}", tone=Tone.WARN)


def gpus(daemon: NriGpu) -> list[str]:
    """The node's GPUs, as `nri-gpu gpus` tells; their UUIDs."""
    found = daemon.gpus()
    for gpu in found["gpus"]:
        lines(f"GPU {gpu['index']}", [f"{gpu['model']}  {gpu['uuid']}"])
    if found["simulated"]:
        lines("", ["(simulated by config/topologies/four-gpus.toml: this machine has no NVIDIA driver)"])
    return [gpu["uuid"] for gpu in found["gpus"]]


def status(daemon: NriGpu) -> None:
    """The verb's own page, on this terminal."""
    told("    $ nri-gpu status")
    daemon.verb("status", capture=False)
