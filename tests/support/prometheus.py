"""A real Prometheus on the loopback, with the rules of deploy/monitoring; it scrapes several times a second.

The rules are those that are shipped, but for how long each must hold before it fires.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self
from urllib.error import HTTPError

from tests.support import packages
from tests.support.waiting import aside, wait_for

MONITORING: Final = Path(__file__).parents[2] / "deploy" / "monitoring"
ALERTS: Final = MONITORING / "alerts.yaml"
READY_S: Final = 30.0
PATIENCE_S: Final = 20.0
EVERY: Final = "200ms"
CONFIG: Final = """
global: {{scrape_interval: {every}, scrape_timeout: {every}, evaluation_interval: {every}}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kubernetes-pods  # of the community's chart
    static_configs: [{{targets: ["{target}"]}}]
"""


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def promtool(*words: str | Path) -> str:
    """Standard output. It must exit with 0."""
    done = subprocess.run(
        [*packages.command("promtool", "prometheus"), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """One that scrapes a target while it is entered."""

    def __init__(self, folder: Path, target: str, *, every: str = EVERY) -> None:
        self._folder = folder
        self._address = f"127.0.0.1:{free_port()}"
        folder.mkdir()
        rules, config = folder / "alerts.yaml", folder / "prometheus.yaml"
        rules.write_text(re.sub(r"\bfor: \w+", "for: 0s", ALERTS.read_text()))
        config.write_text(CONFIG.format(every=every, rules=rules, target=target))

    def __enter__(self) -> Self:
        options = {
            "config.file": self._folder / "prometheus.yaml",
            "storage.tsdb.path": self._folder / "data",
            "web.listen-address": self._address,
        }
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *packages.command("prometheus"),
            *(f"--{name}={to}" for name, to in options.items()),
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for("Prometheus", self._is_ready, READY_S, (self._folder / "log").read_text)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {each["labels"]["alertname"] for each in self._get("alerts")["alerts"] if each["state"] == "firing"}

    def query(self, text: str) -> list[Mapping[str, Any]]:
        """The series of an instant query. Raises: HTTPError: it is no query."""
        result: list[Mapping[str, Any]] = self._get("query", query=text)["result"]
        return result

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except HTTPError as refusal:
            refusal.close()
            return False
        except OSError:
            return False

    def _get(self, what: str, **parameters: str) -> Any:  # noqa: ANN401 - parsed JSON
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]


async def asked_until(what: str, fact: Callable[[], object]) -> None:
    """Until Prometheus says so, asked less often than it scrapes."""
    await aside(wait_for, what, fact, PATIENCE_S, poll_s=0.1)
