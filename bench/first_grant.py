"""`python -m bench.first_grant`: which modules a daemon's first grant enters, in the order of the calls.

A hop is a call from one module of ours into another. Generated code does not count.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, Final

import nri_gpu
from bench.process import Running, daemon_options
from bench.wire import when_ready
from nri_gpu.cli.main import main as nri_gpu_main

PACKAGE: Final = f"{Path(nri_gpu.__file__).parent}/"
READ: Final = ("plugin/transport", "data_received")  # a request is answered within one call of this
DECODE: Final = ("nri/convert", "request_from_pb")
TRACE: Final = "--trace"  # makes it the traced daemon, which writes to this file


class Recorder:
    """Follows calls inside `data_received` until one of them has decided about a container that asks."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._calls: list[tuple[str, str]] = []  # module of the caller, module of what it calls
        self._functions: set[tuple[str, str]] = set()
        self._root: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:  # noqa: ANN401 - as sys.setprofile has it
        """See sys.setprofile."""
        called = _place(frame)
        if event == "call" and called is not None:
            if called == READ and self._root is None:
                self._root, self._calls, self._functions = frame, [], set()
            if self._root is not None:
                caller = _nearest(frame.f_back)
                self._functions.add(called)
                self._calls.append((caller[0] if caller else "", called[0]))
        elif event == "return" and frame is self._root:
            self._root = None
            if DECODE in self._functions and any(function == "place" for _, function in self._functions):
                sys.setprofile(None)
                self._file.write_text(json.dumps(self._calls))


def _place(frame: FrameType) -> tuple[str, str] | None:
    """Module and function of ours; None elsewhere."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE) or "/_pb/" in code.co_filename:
        return None
    return code.co_filename.removeprefix(PACKAGE).removesuffix(".py"), code.co_name


def _nearest(frame: FrameType | None) -> tuple[str, str] | None:
    while frame is not None:
        if place := _place(frame):
            return place
        frame = frame.f_back
    return None


def main() -> int:
    """Start a traced daemon, have it grant 8 GPUs, and print; or be that daemon."""
    if sys.argv[1:2] == [TRACE]:
        _, _, file, *words = sys.argv
        sys.setprofile(Recorder(Path(file)))
        return nri_gpu_main(words)
    with tempfile.TemporaryDirectory(prefix="nri-gpu-bench-") as name:
        folder = Path(name)
        trace = folder / "trace.json"
        words = ["bench.first_grant", TRACE, str(trace), "run", *daemon_options(folder, "traced")]
        plugin = Running(folder, words, "traced")
        try:
            when_ready(plugin)  # which ends with a first grant
            calls = json.loads(trace.read_text())
        finally:
            plugin.stop()
    for line in report(calls):
        print(line)
    return 0


def report(calls: list[tuple[str, str]]) -> list[str]:
    """A line for each module in the order in which it is entered, and the sums."""
    modules = list(dict.fromkeys(called for _, called in calls))
    hops = sum(bool(caller) and caller != called for caller, called in calls)
    return [*modules, "", f"{len(modules)} modules, {hops} hops, {len(calls)} calls"]


if __name__ == "__main__":
    sys.exit(main())
