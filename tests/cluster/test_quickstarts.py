"""The quick starts for clusters on a real Kubernetes, and what they print held against the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_chart import TAG, image
from tests.support import pages
from tests.support.cluster import BUSYBOX, IMAGE, ROOT, Cluster
from tests.support.daemon import FOUR_GPUS

pytestmark = pytest.mark.cluster

__all__ = ["image"]  # a fixture
DEBIAN = "docker.io/library/debian:12"


@pytest.mark.parametrize("page", ["kubernetes", "dra"])
def test_a_reader_follows_it(cluster: Cluster, image: None, tmp_path: Path, page: str) -> None:
    cluster.verb("ctr", "images", "tag", "--force", BUSYBOX, DEBIAN)
    given = {
        "image": {"repository": IMAGE, "tag": TAG},
        "simulation": FOUR_GPUS.read_text(),
        "affinity": {"nodeAffinity": None},
        "paths": {"cdi": str(cluster.cdi)},
    }
    server = cluster.kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}")
    programs = {
        "kubectl": f'exec {os.environ["NRI_GPU_CLUSTER"]}/cluster.sh kubectl "$@"',
        "helm": f'{sys.executable} -m tests.support.helm_cli "$@" | kubectl apply -f -',
    }
    for name, command in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nset -o pipefail\n{command}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        **cluster.environment,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NRI_GPU_CHART_VALUES": json.dumps(given),
        "NRI_GPU_API_PORT": server.rpartition(":")[2],
    }

    def shell(script: str) -> str:
        with (tmp_path / "said").open("w+") as said:
            subprocess.run(
                ["bash", "-c", f"cd {tmp_path}\n{script}"],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                check=False,
                env=environment,
                timeout=600,
            )
            said.seek(0)
            return said.read()

    assert environment["PYTHONPATH"] == str(ROOT)
    pages.follow(pages.FOLDER / f"{page}.md", shell)
    cluster.kubectl("delete", "namespace", "nri-gpu", "--timeout=60s", check=False)
