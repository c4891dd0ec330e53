"""Kubernetes' own API server with its store and nothing else: what it says of objects, and of custom resources.

No node, no controller: nothing that is created becomes more than an object.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from tests import ground
from tests.support.api_server import certificates
from tests.support.errors import HarnessError
from tests.support.prometheus import free_port
from tests.support.waiting import wait_for

_READY_S: Final = 60.0
_TOKEN: Final = "admin"  # of this server on the loopback, and of no other


class LoneApiServer:
    """One that runs while it is entered. Raises: NotBuiltError."""

    def __init__(self) -> None:
        self._programs = ground.need("kubernetes"), ground.need("etcd")
        self._until_exit = ExitStack()
        self._port = free_port()

    def __enter__(self) -> Self:
        with ExitStack() as undoing:
            self._folder = Path(undoing.enter_context(tempfile.TemporaryDirectory(prefix="nri-gpu-test-")))
            (self._folder / "tokens").write_text(f'{_TOKEN},admin,1,"system:masters"\n')
            store, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
            kubernetes, etcd = self._programs
            options = {"listen-client-urls": store, "advertise-client-urls": store, "listen-peer-urls": peers}
            options |= {"initial-advertise-peer-urls": peers, "initial-cluster": f"default={peers}"}
            options |= {"data-dir": str(self._folder / "etcd"), "unsafe-no-fsync": "true"}
            undoing.callback(self._start(etcd / "etcd", options))
            made = certificates()
            options = {"etcd-servers": store, "bind-address": "127.0.0.1", "secure-port": str(self._port)}
            options |= {"tls-cert-file": str(made.certificate), "tls-private-key-file": str(made.key)}
            options |= {"service-account-issuer": "https://kubernetes.default.svc"}
            options |= {"service-account-key-file": str(made.certificate)}
            options |= {"service-account-signing-key-file": str(made.key)}
            options |= {"token-auth-file": str(self._folder / "tokens"), "authorization-mode": "RBAC"}
            options |= {"service-cluster-ip-range": "10.96.0.0/16", "allow-privileged": "true"}
            undoing.callback(self._start(kubernetes / "kube-apiserver", options))
            wait_for("the API server", self._is_ready, _READY_S, self._said, poll_s=0.3)
            self._until_exit = undoing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._until_exit.close()

    def kubeconfig(self) -> Path:
        """Return the admin's, for other programs."""
        cluster = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority": str(certificates().authority)}
        parts = {"cluster": cluster, "user": {"token": _TOKEN}, "context": {"cluster": "own", "user": "own"}}
        made = {f"{kind}s": [{"name": "own", kind: part}] for kind, part in parts.items()}
        file = self._folder / "kubeconfig"
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "own", **made}))
        return file

    def kubectl(self, *words: str | Path, given: str = "") -> str:
        """Standard output of kubectl, as admin. Raises: HarnessError: with what it says."""
        server = f"--server=https://127.0.0.1:{self._port}", f"--certificate-authority={certificates().authority}"
        own = f"--kubeconfig={os.devnull}", f"--cache-dir={self._folder / 'cache'}", f"--token={_TOKEN}"
        command = [str(each) for each in (self._programs[0] / "kubectl", *server, *own, *words)]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise HarnessError(f"kubectl {' '.join(map(str, words))[:200]}: {done.stderr[-2000:]}")
        return done.stdout

    def _start(self, program: Path, options: dict[str, str]) -> Callable[[], None]:
        """Return what ends it."""
        command = ["setpriv", "--pdeathsig", "KILL", str(program), *(f"--{name}={to}" for name, to in options.items())]
        with (self._folder / f"{program.name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def end() -> None:
            process.kill()
            process.wait()

        return end

    def _said(self) -> str:
        return (self._folder / "kube-apiserver.log").read_text()[-3000:]

    def _is_ready(self) -> bool:
        try:
            return self.kubectl("get", "--raw", "/readyz") == "ok"
        except HarnessError:
            return False
