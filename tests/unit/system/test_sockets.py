"""Who is connected to a Unix socket, by both ends of each connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.system.sockets import clients_of, opened_by

CONNECTED: Final = """
import socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""
ALONE: Final = ("unshare", "--net")


@pytest.mark.skipif(os.geteuid() != 0, reason="joins network namespaces")
@pytest.mark.parametrize("words", [(), ALONE], ids=["our network namespace", "another one"])
def test_a_client_of_a_socket(folder: Path, words: tuple[str, ...]) -> None:
    path, other = folder / "a.sock", folder / "b.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as beside:
        for each, at in ((listener, path), (beside, other)):
            each.bind(str(at))
            each.listen()
        command = [*words, sys.executable, "-c", CONNECTED, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert client.stdout
            client.stdout.readline()
            process = Path(f"/proc/{client.pid}")
            opened = {*opened_by(process)}
            accepted, _ = listener.accept()
            with accepted:
                assert len(clients_of(path, process) & opened) == 1
                assert not clients_of(other, process) & opened
                assert not clients_of(path, process) & {*opened_by(Path("/proc/self"))}
            client.communicate()
        assert clients_of(path, process) == frozenset()  # the process has ended
