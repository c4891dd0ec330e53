"""The runtime's end of a connection with a blocking socket: nothing between us and the figure."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Final

from nri_gpu.ttrpc import (
    PLUGIN_SERVICE,
    RUNTIME_SERVICE,
    Mux,
    RequestReceived,
    RequestSent,
    ResponseReceived,
    ResponseSent,
)
from tests.support import nri_messages as nri
from tests.support.nri_messages import NRI_0_8, REQUEST_TIMEOUT_NS

PLUGIN: Final = "nri.pkg.api.v1alpha1.Plugin"
DEADLINE_S: Final = 30.0
READ_BYTES: Final = 1 << 18


class Link:
    """One plugin's connection, past its registration."""

    def __init__(self, listening: socket.socket) -> None:
        listening.settimeout(DEADLINE_S)
        self._socket, _ = listening.accept()
        self._socket.settimeout(DEADLINE_S)
        self._mux = Mux.for_runtime()
        while True:
            for _, event in self._mux.feed(self._socket.recv(READ_BYTES)):
                if isinstance(event, RequestReceived):
                    self._socket.sendall(self._mux.send(RUNTIME_SERVICE, ResponseSent(event.stream_id)))
                    return

    def configure(self) -> None:
        """Configure: from here on the plugin is registered."""
        self.call("Configure", nri.configure(NRI_0_8))

    def call(self, method: str, payload: bytes) -> tuple[ResponseReceived, float]:
        """The answer, and the seconds from the first byte written to the last byte read."""
        stream_id = self._mux[PLUGIN_SERVICE].next_stream_id
        request = self._mux.send(PLUGIN_SERVICE, RequestSent(stream_id, PLUGIN, method, payload, REQUEST_TIMEOUT_NS))
        began = time.perf_counter()
        self._socket.sendall(request)
        data = self._socket.recv(READ_BYTES)
        took_s = time.perf_counter() - began
        while True:
            for _, event in self._mux.feed(data):
                if isinstance(event, ResponseReceived):
                    return event, took_s
            data = self._socket.recv(READ_BYTES)
            took_s = time.perf_counter() - began

    def close(self) -> None:
        self._socket.close()


def listen(path: Path) -> socket.socket:
    """A runtime's socket."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    return listening
