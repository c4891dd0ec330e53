"""Nothing that a container keeps to itself comes out of an observer: not by page, JSON, metrics, log or bundle."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from tests.support.daemon import FOUR_GPUS, Launch
from tests.support.look_node import write_bundle
from tests.support.observer import Observing
from tests.system.test_look import NAMES, OTHER, REQUESTS, SECRET, WHOLE, docker, planted, tasks

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace")
# The node's folders of containers, in place of this machine's.
NODE: Final = 'mount --bind "$0/run" /run && mount --bind "$0/var/lib" /var/lib && exec "$@"'


def plant(root: Path) -> None:
    """A container of Docker and one of a pod with GPU 1, with a secret in each field of each of their files."""
    content: Any = planted(WHOLE)
    content["hooks"] = {"prestart": [{**content["hooks"]["prestart"][0], "path": f"/{SECRET}/nvidia-ctk"}]}
    content["process"]["env"] += [f"{name}={value}" for name, value in NAMES.items()]
    content["linux"]["devices"] = [{"path": f"/dev/{SECRET}", "type": "c", "major": 195, "minor": 1}]
    files: Any = {
        "config.v2": planted({"Name": "/busy", "Config": {"Env": ["TOKEN=x"], "Cmd": ["x"]}, "Path": "x"}),
        "hostconfig": planted({"Binds": ["x"], "LogConfig": {"Config": {"x": "x"}}}),
    }
    files["config.v2"]["Name"] = "/busy"
    files["hostconfig"]["DeviceRequests"] = [{**REQUESTS[0], "Options": {"x": SECRET}, "Capabilities": [[SECRET]]}]
    folder = docker(root, **files)
    bundle = write_bundle(tasks(root), OTHER, content, os.getpid())
    (tasks(root) / "moby" / folder.name / "config.json").write_text(json.dumps(content))
    for beside in (folder, bundle):
        (beside / "x.json").write_text(SECRET)


def scraped(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()


def test_no_secret_comes_out(folder: Path) -> None:
    root, metrics = folder / "node", folder / "metrics.sock"
    plant(root)
    before = ["unshare", "--mount", "sh", "-c", NODE, str(root)]
    launch = replace(Launch(folder / "o", folder / "none", topology=FOUR_GPUS), log_level="TRACE")
    with Observing(launch, more=["--metrics", str(metrics)], before=before) as observer:
        observer.wait_looked()
        assert len({each["container_id"] for each in observer.observed()["allocations"]}) == 2
        told = {
            " ".join(words): observer.verb(*words)
            for words in (
                ("status",),
                ("status", "-o", "wide"),
                ("status", "-o", "json"),
                ("status", "--processes"),
                ("verify",),
                ("doctor", "--bundle", str(folder / "bundle.tar.gz")),
            )
        }
        page = scraped(metrics)
    texts = {name: done.stdout + done.stderr for name, done in told.items()}
    texts |= {"metrics": page, "log": observer.log()}
    unpacked = subprocess.run(["tar", "xzOf", folder / "bundle.tar.gz"], capture_output=True, check=True, text=True)
    texts["bundle"] = unpacked.stdout
    assert all("busy" in texts[name] for name in ("status", "metrics", "bundle"))
    assert [name for name, text in texts.items() if SECRET in text] == []
