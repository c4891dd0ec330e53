"""The NVML event process: waits for NVML's events, so that waiting never delays a refresh.

    python -I -m nri_gpu.health.nvml_events --driver-root DIR [--library-dir DIR ...] [--sysfs DIR]
        [--stage-dir DIR]

One JSON object a line. In: {"watch": ["0000:3b:00.0", ...]}, again whenever it changes. Out: the lines of
`event_child.py`, by their type: "call" before each call as in `inventory/nvml_program.py`, "watching" after each
change, "event" or "unplaced" for each event, and "fault" as the last line: waiting failed, which says nothing about any
GPU. The process ends when stdin ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import select
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from nri_gpu.domain.bounds import UUID
from nri_gpu.domain.health import EventType
from nri_gpu.inventory.library import LibraryError
from nri_gpu.inventory.nvml_client import NO_INSTANCE, TIMEOUT, NvmlCallError, NvmlClient
from nri_gpu.inventory.nvml_program import NvmlProgram, start
from nri_gpu.system.proc import name_process

WAIT_MS: Final = 1000  # a change of what is watched may have to wait as long
WANTED: Final = int(sum(EventType))


class EventSet:
    """NVML's event set. Each GPU is registered by itself, so that a GPU which fails does not affect the others."""

    def __init__(self, nvml: NvmlClient) -> None:
        self._nvml = nvml
        self._set: object = nvml.call("nvmlEventSetCreate")
        self._uuids: dict[int, str] = {}  # by handle: a lost GPU may not tell its UUID any more
        self.watching: set[str] = set()

    def register(self, bus_ids: Iterable[str]) -> Mapping[str, str]:
        """Add GPUs. Return those that cannot be watched, with the reason."""
        failed = {}
        for bus_id in bus_ids:
            try:
                self._register(bus_id)
                self.watching.add(bus_id)
            except NvmlCallError as error:
                failed[bus_id] = str(error)
        return failed

    def wait(self) -> Mapping[str, object] | None:
        """Return the line that reports an event, or None if none happened in time.

        Raises: NvmlCallError, if waiting fails.
        """
        try:
            data = self._nvml.call("nvmlEventSetWait_v2", self._set, WAIT_MS)
        except NvmlCallError as error:
            if error.code == TIMEOUT:
                return None
            raise
        kind = int(data.eventType)
        try:
            uuid = self._uuids.get(_number(data.device)) or self._uuid(data.device)
        except NvmlCallError as error:
            why = f"NVML reported event {kind:#x} ({data.eventData}) without its GPU: {error}"
            return {"type": "unplaced", "why": why}
        xid = int(data.eventData) if kind == EventType.XID else 0
        gi, ci = (None if each == NO_INSTANCE else int(each) for each in (data.gpuInstanceId, data.computeInstanceId))
        return {"type": "event", "uuid": uuid, "kind": kind, "xid": xid, "gi": gi, "ci": ci}

    def _register(self, bus_id: str) -> None:
        # By bus id NVML touches only this GPU, by index every one up to it (nvml.h).
        handle = self._nvml.call("nvmlDeviceGetHandleByPciBusId", bus_id.encode())
        self._uuids[_number(handle)] = self._uuid(handle)
        supported = int(self._nvml.call("nvmlDeviceGetSupportedEventTypes", handle)) & WANTED
        self._nvml.call("nvmlDeviceRegisterEvents", handle, supported, self._set)

    def _uuid(self, handle: object) -> str:
        return self._nvml.parsed(UUID.parse, "nvmlDeviceGetUUID", handle)


def _number(handle: object) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0  # type: ignore[arg-type] # the binding's pointer


class EventProgram:
    """A program that watches the GPUs it is told to, until stdin ends.

    requests: unbuffered, so that select sees all of it.
    """

    def __init__(self, program: NvmlProgram, requests: io.FileIO) -> None:
        self._program = program
        self._requests = requests
        self._wanted: frozenset[str] = frozenset()
        self._ended = False

    def run(self) -> None:
        """Watch until stdin ends. Raises: NvmlCallError, LibraryError."""
        self._read_request(timeout_s=None)
        while not self._ended:
            with self._program.session(self._program.library.find()):
                self._watch()

    def _watch(self) -> None:
        """Watch until fewer GPUs are wanted: only the end of the NVML session closes a GPU's device node."""
        events = EventSet(self._program.nvml)
        registered: frozenset[str] = frozenset()
        while not self._ended and registered <= self._wanted:
            if registered != self._wanted:
                failed = events.register(sorted(self._wanted - registered))
                registered = self._wanted
                self._program.send(type="watching", gpus=sorted(events.watching), failed=dict(failed))
            if not events.watching:  # NVML does not wait on an empty set
                self._read_request(timeout_s=None)
            elif line := events.wait():
                self._program.send(**line)
            self._read_request(timeout_s=0)

    def _read_request(self, timeout_s: float | None) -> None:
        if not select.select([self._requests], [], [], timeout_s)[0]:
            return
        line = self._requests.readline()
        self._ended = not line
        if line:
            self._wanted = frozenset(map(str, json.loads(line)["watch"]))


def main(arguments: list[str] | None = None) -> int:
    """Watch until stdin ends. Return 1 if waiting failed."""
    program, requests = start("nri_gpu.health.nvml_events", arguments, NvmlProgram)
    with (
        os.fdopen(requests, "rb", buffering=0) as lines,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        try:
            EventProgram(program, lines).run()
        except (NvmlCallError, LibraryError) as error:
            program.send(type="fault", why=str(error))
            return 1
    return 0


if __name__ == "__main__":
    name_process("events")
    sys.exit(main())
