"""Each burst of changes is reported once, whatever noticed it first: device events, inotify or a look."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nri_gpu.inventory.node_watch import (
    KERNEL_PORT,
    MESSAGE_MAX,
    NodeWatch,
    Pace,
    Uevents,
    concerns_gpus,
    netlink,
    node_watch,
    parse_uevent,
)
from tests.support.log import Log
from tests.support.running import running
from tests.support.scripted_runtime import until

SELDOM = Pace(look_s=60.0, quiet_s=0.02, longest_s=0.5)
OFTEN = Pace(look_s=0.005, quiet_s=0.0)


class Node:
    """What a look shows, and how often a change was reported."""

    def __init__(self) -> None:
        self.state: Hashable = 0
        self.looks = 0
        self.reports = 0

    def look(self) -> Hashable:
        self.looks += 1
        return self.state

    def changed(self) -> None:
        self.reports += 1


@asynccontextmanager
async def watching(watch: NodeWatch, node: Node) -> AsyncIterator[None]:
    async with running(watch.run()):
        await until("the first look", lambda: node.looks > 0)
        yield


async def reported(node: Node, times: int = 1) -> None:
    await until(f"{times} reports", lambda: node.reports == times)


def quiet(node: Node, pace: Pace) -> NodeWatch:
    return NodeWatch(node.look, node.changed, folders=(), uevents=False, pace=pace)


async def test_a_look_finds_a_change_without_an_event() -> None:
    node = Node()
    async with watching(quiet(node, OFTEN), node):
        looks = node.looks
        await until("node.looks > looks + 5", lambda: node.looks > looks + 5)
        assert node.reports == 0
        node.state = 1
        await reported(node)


async def test_a_burst_is_one_change() -> None:
    node = Node()
    watch = quiet(node, SELDOM)
    async with watching(watch, node):
        for _ in range(20):
            watch.notify()
            await asyncio.sleep(0)
        await reported(node)
        assert node.looks == 2


async def test_an_endless_burst_is_reported_too() -> None:
    node = Node()
    watch = quiet(node, Pace(look_s=60.0, quiet_s=1.0, longest_s=0.05))

    async def notify() -> None:
        while True:
            watch.notify()
            await asyncio.sleep(0.005)

    async with running(notify()), watching(watch, node):
        await until("a report", lambda: node.reports > 0)


async def test_a_node_in_dev_and_in_a_folder_that_is_new(folder: Path) -> None:
    node = Node()
    below = folder / "nvidia-caps"
    watch = NodeWatch(node.look, node.changed, folders=(folder, below), uevents=False, pace=SELDOM)
    async with watching(watch, node):
        node.state = 1
        below.mkdir()
        await reported(node)
        node.state = 2
        (below / "nvidia-cap3").touch()
        await reported(node, 2)
        looks = node.looks
        (folder / "loop7").touch()  # looked at, and of no interest
        await until("node.looks > looks", lambda: node.looks > looks)
        assert node.reports == 2


DEAF = {
    "device events": (
        "nri_gpu.inventory.node_watch.Uevents.open",
        OSError(errno.EAFNOSUPPORT, "no"),
        "no device events: looking for changes of the node each second",
        "cannot receive the kernel's device events (Address family not supported by protocol)",
    ),
    "inotify": (
        "nri_gpu.system.folder_watch._inotify_init",
        OSError(errno.EMFILE, "Too many open files"),
        "no inotify: looking for changes of device nodes each second",
        "Too many open files",
    ),
}


@pytest.mark.parametrize(("call", "error", "line", "fault"), DEAF.values(), ids=DEAF)
async def test_a_sandbox_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, log: Log, call: str, error: OSError, line: str, fault: str
) -> None:
    def refuse(*_: Uevents) -> None:
        raise error

    monkeypatch.setattr(call, refuse)
    node = Node()
    async with watching(NodeWatch(node.look, node.changed, folders=(folder,), pace=OFTEN), node):
        node.state = 1
        await reported(node)
    assert fault in str(log.one(line).fields)


async def test_of_the_machine_and_of_a_topology_file() -> None:
    for simulated in (False, True):
        node = Node()
        watch = node_watch(node.look, node.changed, simulated=simulated)
        async with watching(watch, node):
            watch.notify()
            await reported(node)


# --- device events ----------------------------------------------------------------------------------------------------

PCI = "add@/devices/pci0000:00/0000:00:01.0/0000:01:00.0"


def message(head: str, **variables: str) -> bytes:
    return "\0".join([head, *(f"{key}={value}" for key, value in variables.items()), ""]).encode()


CASES = {
    "a GPU on the bus": (message(PCI, SUBSYSTEM="pci", PCI_ID="10DE:2330"), True),
    "a driver bound to a GPU": (message(PCI.replace("add", "bind"), SUBSYSTEM="pci", DRIVER="nvidia"), True),
    "another PCI function": (message(PCI, SUBSYSTEM="pci", PCI_ID="8086:1572"), False),
    "our modules": (message("add@/module/nvidia_uvm", SUBSYSTEM="module", DEVPATH="/module/nvidia_uvm"), True),
    "another module": (message("add@/module/loop", SUBSYSTEM="module", DEVPATH="/module/loop"), False),
    "a render node": (message("add@/devices/x/drm/renderD128", SUBSYSTEM="drm"), True),
    "a class of the driver's": (message("add@/devices/virtual/nvidia/nvidiactl", SUBSYSTEM="nvidia"), True),
    "a disk": (message("change@/devices/virtual/block/loop0", SUBSYSTEM="block"), False),
    "a message of udev's": (b"libudev\0\xfe\xed\xca\xfe\0\0\0", False),
    "no variables": (b"add@/module/nvidia", False),
    "nothing": (b"", False),
    "no text": (b"add@\xff\xfe\0SUBSYSTEM=\xff", False),
}


@pytest.mark.parametrize(("raw", "concerns"), CASES.values(), ids=CASES)
def test_what_concerns_gpus(raw: bytes, concerns: bool) -> None:
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


def changes(kernel: Kernel) -> int:
    async def listen() -> int:
        found: list[bool] = []
        events = Uevents(lambda: found.append(True), lambda: kernel)
        events.open()
        while kernel.answers:  # noqa: ASYNC110 - the loop reads when it finds it readable
            await asyncio.sleep(0)
        events.close()
        return len(found)

    with kernel.other_end:
        return asyncio.run(listen())


OURS, OTHERS = CASES["a GPU on the bus"][0], CASES["another PCI function"][0]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(OTHERS, 0), (OURS, 0), (OURS, 0)], 1),
        ([(OTHERS, 0)], 0),
        ([(OURS, 4711)], 0),  # another sender than the kernel
        ([OSError(errno.ENOBUFS, "lost")], 1),
    ],
)
def test_a_batch_is_reported_once_if_one_message_concerns_gpus(
    answers: list[tuple[bytes, int] | OSError], expected: int
) -> None:
    kernel = Kernel(*answers)
    assert changes(kernel) == expected
    assert kernel.fileno() == -1  # closed


def reported_by_the_kernel(file: Path) -> Mapping[str, str]:
    """Its message about a device, on request."""
    device = "/" + str(file.parent.resolve().relative_to("/sys"))
    with netlink() as kernel:
        file.write_text("change")
        kernel.settimeout(10)
        while True:
            message, (port, _) = kernel.recvfrom(MESSAGE_MAX)
            event = parse_uevent(message)
            if port == KERNEL_PORT and event.get("DEVPATH") == device:
                return event


@pytest.mark.parametrize(
    ("pattern", "subsystem", "ours"),
    [
        ("bus/pci/devices/*/uevent", "pci", {"PCI_ID": "10DE:2330"}),
        ("class/mem/null/uevent", "mem", {"SUBSYSTEM": "nvidia"}),
    ],
)
def test_a_real_message(pattern: str, subsystem: str, ours: Mapping[str, str]) -> None:
    """A real message of another vendor's device: not ours, but for the one field that would make it so."""
    event = reported_by_the_kernel(next(iter(sorted(Path("/sys").glob(pattern)))))
    assert event["SUBSYSTEM"] == subsystem
    assert ours.keys() <= event.keys()
    assert not concerns_gpus(event)
    assert concerns_gpus({**event, **ours})
