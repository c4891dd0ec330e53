"""Which of the kernel's messages are about GPUs, and that one of them is enough."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nri_gpu.inventory.node_watch import (
    KERNEL_PORT,
    MESSAGE_MAX,
    Uevents,
    concerns_gpus,
    explain,
    netlink,
    parse_uevent,
)

PCI = "add@/devices/pci0000:00/0000:00:01.0/0000:01:00.0"


def message(head: str, **variables: str) -> bytes:
    return "\0".join([head, *(f"{key}={value}" for key, value in variables.items()), ""]).encode()


CASES = [
    ("a GPU on the bus", message(PCI, SUBSYSTEM="pci", PCI_ID="10DE:2330"), True),
    ("a driver bound to a GPU", message(PCI.replace("add", "bind"), SUBSYSTEM="pci", DRIVER="nvidia"), True),
    ("another PCI function", message(PCI, SUBSYSTEM="pci", PCI_ID="8086:1572"), False),
    ("our modules", message("add@/module/nvidia_uvm", SUBSYSTEM="module", DEVPATH="/module/nvidia_uvm"), True),
    ("another module", message("add@/module/loop", SUBSYSTEM="module", DEVPATH="/module/loop"), False),
    ("a render node", message("add@/devices/x/drm/renderD128", SUBSYSTEM="drm"), True),
    ("a class of the driver's", message("add@/devices/virtual/nvidia/nvidiactl", SUBSYSTEM="nvidia"), True),
    ("a disk", message("change@/devices/virtual/block/loop0", SUBSYSTEM="block"), False),
    ("a message of udev's", b"libudev\0\xfe\xed\xca\xfe\0\0\0", False),
    ("no variables", b"add@/module/nvidia", False),
    ("nothing", b"", False),
    ("no text", b"add@\xff\xfe\0SUBSYSTEM=\xff", False),
]


@pytest.mark.parametrize(("_", "raw", "concerns"), CASES, ids=[case[0] for case in CASES])
def test_what_concerns_gpus(_: str, raw: bytes, concerns: bool) -> None:
    assert concerns_gpus(parse_uevent(raw)) is concerns


class Kernel(socket.socket):
    """The netlink socket as `recvfrom` shows it: messages with their sender, and errors."""

    def __init__(self, *answers: tuple[bytes, int] | OSError) -> None:
        ours, self.other_end = socket.socketpair()
        super().__init__(fileno=ours.detach())
        self.other_end.send(b"!")  # readable
        self.answers = list(answers)

    def recvfrom(self, *_: object) -> tuple[bytes, tuple[int, int]]:
        if not self.answers:
            raise BlockingIOError
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer[0], (answer[1], 1)


def heard(kernel: Kernel) -> int:
    async def listen() -> int:
        told: list[bool] = []
        events = Uevents(lambda: told.append(True), lambda: kernel)
        events.open()
        while kernel.answers:  # noqa: ASYNC110 - the loop reads when it finds it readable
            await asyncio.sleep(0)
        events.close()
        return len(told)

    with kernel.other_end:
        return asyncio.run(listen())


OURS, OTHERS = CASES[0][1], CASES[2][1]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([(OTHERS, 0), (OURS, 0), (OURS, 0)], 1),
        ([(OTHERS, 0)], 0),
        ([(OURS, 4711)], 0),  # somebody who is not the kernel
        ([OSError(errno.ENOBUFS, "lost")], 1),
    ],
)
def test_a_batch_is_told_once_if_one_of_it_concerns(answers: list[tuple[bytes, int] | OSError], told: int) -> None:
    kernel = Kernel(*answers)
    assert heard(kernel) == told
    assert kernel.fileno() == -1  # closed


def test_the_real_socket_opens_and_closes_without_a_capability() -> None:
    async def listen() -> None:
        events = Uevents(lambda: None)
        events.open()
        events.close()
        events.close()

    asyncio.run(listen())


def told_by_the_kernel(file: Path) -> Mapping[str, str]:
    """What it says of a device when it is asked to say so again."""
    with netlink() as kernel:
        file.write_text("change")
        kernel.settimeout(10)
        while True:
            message, (port, _) = kernel.recvfrom(MESSAGE_MAX)
            event = parse_uevent(message)
            if port == KERNEL_PORT and event.get("DEVPATH") == told_path(file):
                return event


def told_path(file: Path) -> str:
    """Of the device that a file `uevent` is of, as the kernel has it."""
    return "/" + str(file.parent.resolve().relative_to("/sys"))


@pytest.mark.parametrize(
    ("pattern", "subsystem", "ours"),
    [
        ("bus/pci/devices/*/uevent", "pci", {"PCI_ID": "10DE:2330"}),
        ("class/mem/null/uevent", "mem", {"SUBSYSTEM": "nvidia"}),
    ],
)
def test_the_kernel_says_what_we_go_by(pattern: str, subsystem: str, ours: Mapping[str, str]) -> None:
    """A real message of another vendor's device: not ours, but for the one field that would make it so."""
    event = told_by_the_kernel(next(iter(sorted(Path("/sys").glob(pattern)))))
    assert event["SUBSYSTEM"] == subsystem
    assert ours.keys() <= event.keys()
    assert not concerns_gpus(event)
    assert concerns_gpus({**event, **ours})


def test_why_there_is_none() -> None:
    assert "cannot receive the kernel's device events (Operation not permitted)" in explain(
        PermissionError(errno.EPERM, "no")
    )


def test_the_unit_lets_the_events_in_and_no_network() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.inventory.hearing"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
