"""The quick starts for clusters on a real Kubernetes by Helm, and what they print held against the page."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from shlex import quote

import pytest

from tests.support import pages
from tests.support.cluster import BUSYBOX, IMAGE, NAMESPACE, ROOT, Cluster
from tests.support.cluster_claims import ACCOUNT
from tests.support.helm import PROGRAMS, Helm
from tests.support.observed_cluster import usual_bundles

pytestmark = pytest.mark.cluster

DEBIAN = "docker.io/library/debian:12"


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("page", ["kubernetes", "dra", "observe"])
def test_a_reader_follows_it(cluster: Cluster, image: None, tmp_path: Path, page: str, program: str) -> None:
    cluster.verb("ctr", "images", "tag", "--force", BUSYBOX, DEBIAN)
    helm = Helm(program, tmp_path, cluster.admin)
    given, reach = tmp_path / "values.json", tmp_path / "reach.json"
    given.write_text(json.dumps(cluster.chart_values()))
    reach.write_text(json.dumps(cluster.reach))
    patch = f"kubectl -n {NAMESPACE} patch daemonset {ACCOUNT} --patch-file {reach}" if page == "dra" else "true"
    own = f"image.repository={IMAGE}"  # the page's is the reader's
    programs = {
        "kubectl": f'exec {quote(os.environ["NRI_GPU_CLUSTER"])}/cluster.sh kubectl "$@"',
        "helm": f'cd {quote(str(ROOT))} && [ "$1" = install ] || exec {helm.path} "$@"\n'
        f'{helm.path} "$@" -f {given} --set {own} && {patch}',
    }
    for name, command in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{command}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**helm.environment, **cluster.environment, "PATH": f"{tmp_path}:{cluster.environment['PATH']}"}
    environment["KUBECONFIG"] = str(cluster.admin)

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

    with usual_bundles(cluster) if page == "observe" else nullcontext():
        pages.follow(pages.FOLDER / f"{page}.md", shell)
