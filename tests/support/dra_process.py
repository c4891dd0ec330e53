"""`nri-gpu dra` as a process of its own, beside a daemon."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from msgspec.structs import replace

from tests.support.api_server import StandInApiServer
from tests.support.daemon import Launch, NriGpu, options
from tests.support.kubeconfig import kubeconfig
from tests.support.resource_claims import NODE


class NriDra(NriGpu):
    """A running driver process. beside: how the daemon is started whose state folder it asks in."""

    def __init__(self, beside: Launch, server: StandInApiServer) -> None:
        self._state = beside.state
        super().__init__(replace(beside, base=beside.base.with_name(f"{beside.base.name}-dra")))
        self._kubeconfig = kubeconfig_file(server, self.launch.base / "kubeconfig")

    def program(self) -> list[str]:
        given = {
            "--state-dir": self._state,
            "--kubeconfig": self._kubeconfig,
            "--node-name": NODE,
            "--log-level": self.launch.log_level,
        }
        return [sys.executable, "-m", "nri_gpu", "dra", *options(given)]


def kubeconfig_file(server: StandInApiServer, file: Path) -> Path:
    """A kubeconfig, as JSON, for that server."""
    cluster = {"server": server.access().url, "certificate-authority": str(server.certificates.authority)}
    file.write_text(json.dumps(kubeconfig(cluster, {"token": server.token or "any"})))
    return file


def policy(folder: Path, cdi: Path) -> str:
    """A daemon's policy that serves claims, for a kubelet whose folders are below one."""
    kubelet = f'[kubelet]\nregistry_dir = "{folder}/plugins_registry"\ncdi_dir = "{cdi}"\npodresources = ""\n'
    return f'{kubelet}[dra]\nenabled = true\ncdi_enabled = true\ndir = "{folder}/plugins"\n'
