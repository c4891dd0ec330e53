"""Waits for NVML's events: a program of its own that `hearing.py` runs, so that waiting never holds up a survey.

    python -I -m nri_gpu.health.events --driver-root DIR [--library-dir DIR ...] [--sysfs DIR]

One JSON object a line. In: {"watch": ["0000:3b:00.0", ...]}, again whenever it changes. Out: {"call": ...} before each
call as in `nvml.py`, {"watching": [...], "deaf": {"0000:3b:00.0": "why"}} after each change, and for what happens
{"event": {"uuid": "GPU-...", "kind": 8, "xid": 79, "gi": 1, "ci": 0}} (null where NVML names no MIG device) or
{"unplaced": "a sentence"}. {"fault": "a sentence"} is the last line: waiting failed, which says nothing of any GPU in
particular. The end of stdin is the end of the program.
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
from pathlib import Path
from typing import Any, Final

from nri_gpu.domain.health import EventType
from nri_gpu.inventory.identity import parse_uuid
from nri_gpu.inventory.nvml import LOAD, Library, LibraryError, Speaker, confine, options_of, private_pipes, session
from nri_gpu.inventory.nvml_client import TIMEOUT, Ask, CallError, parsed

WAIT_MS: Final = 1000  # also how long a change of what is watched may have to wait
WANTED: Final = int(sum(EventType))
NO_INSTANCE: Final = 0xFFFFFFFF  # of an event that is the whole GPU's (nvml.h: nvmlEventData_t)


class Ears:
    """One event set. Every GPU is registered for itself: one that fails costs itself alone."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._set: Any = ask("nvmlEventSetCreate")
        self._uuids: dict[int, str] = {}  # by handle, for when it cannot be asked any more
        self.watching: set[str] = set()

    def watch(self, bus_ids: Iterable[str]) -> Mapping[str, str]:
        """Adds GPUs. Returns those that cannot be listened to, with the reason."""
        deaf = {}
        for bus_id in bus_ids:
            try:
                self._register(bus_id)
                self.watching.add(bus_id)
            except CallError as error:
                deaf[bus_id] = str(error)
        return deaf

    def wait(self) -> Mapping[str, object] | None:
        """What happened, if anything did. Raises: CallError, where waiting itself fails."""
        try:
            data = self._ask("nvmlEventSetWait_v2", self._set, WAIT_MS)
        except CallError as error:
            if error.code == TIMEOUT:
                return None
            raise
        uuid, fault = self._whose(data.device)
        if fault:
            return {
                "unplaced": f"NVML told of an event {data.eventType:#x} ({data.eventData}) without its GPU: {fault}"
            }
        xid = int(data.eventData) if data.eventType == EventType.XID else 0
        gi, ci = (None if each == NO_INSTANCE else int(each) for each in (data.gpuInstanceId, data.computeInstanceId))
        return {"event": {"uuid": uuid, "kind": int(data.eventType), "xid": xid, "gi": gi, "ci": ci}}

    def _register(self, bus_id: str) -> None:
        # By bus id: NVML then touches that GPU alone, and not every one up to its index (nvml.h).
        handle = self._ask("nvmlDeviceGetHandleByPciBusId", bus_id.encode())
        self._uuids[_number(handle)] = parsed(parse_uuid, self._ask("nvmlDeviceGetUUID", handle), "nvmlDeviceGetUUID")
        supported = int(self._ask("nvmlDeviceGetSupportedEventTypes", handle)) & WANTED
        self._ask("nvmlDeviceRegisterEvents", handle, supported, self._set)

    def _whose(self, handle: object) -> tuple[str, str]:
        """The UUID, or why there is none. A GPU that is just lost may not tell its own any more."""
        if known := self._uuids.get(_number(handle)):
            return known, ""
        try:
            return parsed(parse_uuid, self._ask("nvmlDeviceGetUUID", handle), "nvmlDeviceGetUUID"), ""
        except CallError as error:
            return "", str(error)


def _number(handle: object) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0  # type: ignore[arg-type] # the binding's pointer


class Listener:
    """Watches what it is told to, until stdin ends. requests: unbuffered, so that select sees all there is."""

    def __init__(self, speaker: Speaker, requests: io.FileIO) -> None:
        self._speaker = speaker
        self._requests = requests
        self._wanted: frozenset[str] = frozenset()
        self._ended = False

    def run(self, library: Library, sysfs: Path) -> None:
        """Raises: CallError, LibraryError."""
        self._hear_request(patience_s=None)
        while not self._ended:
            path = library.find()
            self._speaker.say(call=LOAD, gpu=None)
            library.load(path)
            with session(self._speaker, path, sysfs):
                self._listen()

    def _listen(self) -> None:
        """Until a GPU is to be let go: only the end of the session closes its node."""
        ears = Ears(self._speaker.ask)
        asked: frozenset[str] = frozenset()
        while not self._ended and asked <= self._wanted:
            if asked != self._wanted:
                deaf = ears.watch(sorted(self._wanted - asked))
                asked = self._wanted
                self._speaker.say(watching=sorted(ears.watching), deaf=dict(deaf))
            if not ears.watching:  # NVML would not wait for nothing
                self._hear_request(patience_s=None)
            elif said := ears.wait():
                self._speaker.say(**said)
            self._hear_request(patience_s=0)

    def _hear_request(self, patience_s: float | None) -> None:
        if not select.select([self._requests], [], [], patience_s)[0]:
            return
        line = self._requests.readline()
        self._ended = not line
        if line:
            self._wanted = frozenset(map(str, json.loads(line)["watch"]))


def main(arguments: list[str] | None = None) -> int:
    """Listens until stdin ends. Returns 1 where waiting failed."""
    options = options_of("nri_gpu.health.events", arguments)
    speaker, requests = private_pipes()
    confine()
    library = Library(options.driver_root, options.library_dir)
    with (
        os.fdopen(requests, "rb", buffering=0) as lines,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        try:
            Listener(speaker, lines).run(library, options.sysfs)
        except (CallError, LibraryError) as error:
            speaker.say(fault=str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
