from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu._pb import nri_pb2
from nri_gpu.ttrpc import OK, PLUGIN_SERVICE, RUNTIME_SERVICE, Mux, RequestReceived, ResponseReceived
from tests.support.recording import FOLDER, parse, recordings, replay
from tests.unit.ttrpc.helpers import cuts, feed_mux


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.stem)
def test_we_send_the_bytes_of_the_recording(path: Path) -> None:
    for write, _, ours in replay(parse(path.read_text())):
        assert ours == write.data, f"line {write.line}: {write.comment}"


def opening(version: str) -> list[bytes]:
    return [w.data for w in parse((FOLDER / f"opening-containerd-{version}.session").read_text()).writes]


@pytest.mark.parametrize(
    ("version", "runtime_version", "timeouts"),
    [("1.7.24", "1.7.24~ds1", (0, 0)), ("2.1.9", "2.1.9+unknown", (5000, 2000))],
)
def test_configure_reads_as_it_was_meant(version: str, runtime_version: str, timeouts: tuple[int, int]) -> None:
    for _, chunks in cuts(opening(version)[1]):
        [(conn_id, event)] = feed_mux(Mux.for_plugin(), chunks)
        assert conn_id == PLUGIN_SERVICE
        assert isinstance(event, RequestReceived)
        assert (event.method, event.timeout_ns, event.metadata) == ("Configure", 2_000_000_000, ())
        request = nri_pb2.ConfigureRequest.FromString(event.payload)
        assert (request.runtime_name, request.runtime_version) == ("containerd", runtime_version)
        assert (request.registration_timeout, request.request_timeout) == timeouts


def test_register_plugin_and_its_empty_reply() -> None:
    recording = parse((FOLDER / "opening-containerd-2.1.9.session").read_text())
    register, _, reply, _ = (write.data for write in recording.writes)
    [(_, event)] = Mux.for_runtime().feed(register)
    assert isinstance(event, RequestReceived)
    request = nri_pb2.RegisterPluginRequest.FromString(event.payload)
    assert (request.plugin_name, request.plugin_idx, event.timeout_ns) == ("raw", "42", 5_000_000_000)
    plugin = Mux.for_plugin()
    assert list(plugin.feed(reply)) == []  # nobody asked yet
    events = [event for _, events, _ in replay(recording) for event in events]
    assert events[2] == (RUNTIME_SERVICE, ResponseReceived(event.stream_id, OK))
