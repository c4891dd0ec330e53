"""A journal of a test's own: the socket that systemd's would listen on, and what was sent to it."""

import socket
from pathlib import Path
from typing import Final

from tests.support.waiting import wait_for

DEADLINE_S: Final = 20.0


class Journal:
    """Entries as systemd.journal-fields(7) has them: one datagram of NAME=value lines each."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.entries: list[dict[str, str]] = []

    def close(self) -> None:
        self._socket.close()

    def find(self, text: str) -> list[dict[str, str]]:
        """Entries whose message holds a text."""
        while True:
            try:
                datagram = self._socket.recv(1 << 16).decode()
            except BlockingIOError:
                return [entry for entry in self.entries if text in entry["MESSAGE"]]
            self.entries.append(dict(line.split("=", 1) for line in datagram.splitlines()))

    def wait(self, text: str, count: int = 1) -> dict[str, str]:
        """The newest entry with a text, once there are that many."""
        wait_for(f"the journal to hold {text!r}", lambda: len(self.find(text)) >= count, DEADLINE_S, self._explain)
        return self.find(text)[-1]

    def _explain(self) -> str:
        return "\n".join(entry["MESSAGE"] for entry in self.entries)
