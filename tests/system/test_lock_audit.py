"""The audit of the lock, against a service of our own that speaks OSV's interface."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

from deploy.locks import audit
from tools.locks import locked

FOUND: Final = {
    "vulns": [
        {
            "id": "OSV-2026-0001",
            "summary": "made up",
            "affected": [{"package": {"name": "urllib3", "ecosystem": "PyPI"}}],
        }
    ]
}


@contextmanager
def service(vulnerable: str | None) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the packages that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]["name"]
            asked.append(name)
            body = json.dumps(FOUND if name == vulnerable else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
        finally:
            server.shutdown()
            thread.join()


def audited(url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(audit.__file__))]
    environment = {**os.environ, audit.SERVICE: url, "NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_every_locked_package_is_asked_for() -> None:
    with service(None) as (url, asked):
        done = audited(url)
    assert done.returncode == 0, done.stderr
    assert set(asked) - {"pip"} == set(locked("runtime.txt"))


def test_a_known_vulnerability_fails_it() -> None:
    with service("urllib3") as (url, _):
        done = audited(url)
    assert done.returncode == 1
    assert "OSV-2026-0001" in done.stdout


def test_without_a_service_one_line_says_that_nothing_was_audited() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = audited(f"http://127.0.0.1:{unused.getsockname()[1]}/v1/query")
    assert done.returncode == 0
    assert done.stdout.startswith("not audited:")
    assert done.stdout.count("\n") == 1


def test_a_service_that_is_silent_keeps_nobody_waiting() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        fault = audit.unreachable(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/query")
    assert fault is not None
