"""`nri-gpu explain` says of a manifest's pods what the daemon then does with them, one after the other.

The manifests are in the form of what Helm, kubectl, Kueue, JobSet and Kubeflow print. On one containerd: all of it is
decided before the runtime's version matters.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from nri_gpu.cli.pod_manifest import ManifestContainer, read_pods
from nri_gpu.domain.names import GRANT_KEY
from tests.support.containerd import Containerd
from tests.support.cri import Cri, CriError, Pod
from tests.support.daemon import ENVIRONMENT, Launch, NriGpu
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec

pytestmark = on_newest

MANIFESTS = sorted(Path(__file__).parents[1].glob("fixtures/manifests/*.yaml"))
POLICY = """
[namespaces]
deny = ["batch"]
[environment]
may_ask = ["vision"]
[limits]
gpus_per_pod = 2
[[rule]]
name = "guaranteed"
qos = "guaranteed"
allow = true
default_mode = "shared"
[[rule]]
name = "no-labs"
namespace = "vision"
pod = "lab-*"
allow = false
[[rule]]
name = "team"
labels = { team = "vision" }
allow = true
default_mode = "shared"
"""


class Outcome(NamedTuple):
    """Of one container. mode: `none` without GPUs, empty where it is not granted."""

    decision: str
    code: str = ""
    mode: str = ""
    gpu_uuids: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch) -> Launch:
    return module_launch.with_policy(POLICY)


def explained(launch: Launch, manifest: Path) -> list[Outcome]:
    options = ("--gpus", launch.topology, "--policy", launch.policy, "--driver-root", launch.driver_root, "-o", "json")
    command = [sys.executable, "-m", "nri_gpu", "explain", str(manifest), *map(str, options)]
    said = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False, cwd="/").stdout
    lines = json.loads(said)["containers"]
    return [
        Outcome(line["decision"], line.get("code", ""), line.get("mode", ""), tuple(line.get("gpu_uuids", ())))
        for line in lines
    ]


def created(
    cri: Cri, pod: Pod, listed: ManifestContainer, volume: Path, tokens: Mapping[str, str], cdi: Sequence[str]
) -> Outcome:
    """What the daemon does with the container. One that ends is gone afterwards. tokens, cdi: of the kubelet."""
    container = listed.container
    spec = ContainerSpec(
        name=container.name,
        env=container.env,
        mounts={place: str(volume) for place in container.mounts},
        privileged=container.privileged,
        annotations=tokens,
        cdi_devices=tuple(cdi),
    )
    try:
        running = cri.run(pod, spec)
    except CriError as error:
        code = re.search(r"nri-gpu \[([a-z-]+)\]", error.details)
        assert code, error
        return Outcome("refuse", code[1])
    grant = cri.status(running).oci.get("annotations", {}).get(GRANT_KEY)
    if listed.ends:
        cri.stop(running)
        cri.remove(running)
    if grant is None:
        return Outcome("pass")
    fields = dict(field.partition("=")[::2] for field in grant.split(";"))
    uuids = fields["uuid"].split(",") if fields["uuid"] else ()
    return Outcome("inject", mode=fields["mode"], gpu_uuids=tuple(uuids))


@contextmanager
def sandbox(
    node: Containerd, kubepods: str, containers: Sequence[ManifestContainer], number: int, uid: str = ""
) -> Iterator[tuple[Cri, Pod]]:
    """The pod of these containers, made as a kubelet makes it."""
    of = containers[0].container.pod
    parent = kubepods.removesuffix("/kubepods") + of.cgroup_parent + str(number)
    with Cri(node.cri_socket, cgroup_parent=parent) as cri:
        privileged = any(each.container.privileged for each in containers)
        spec = PodSpec(
            name=of.name,
            namespace=of.namespace,
            uid=uid,
            labels=of.labels,
            annotations=of.annotations,
            privileged=privileged,
        )
        yield cri, cri.run_pod(spec)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_same_answer(
    node: Containerd, shared_daemon: NriGpu, kubepods: str, tmp_path: Path, manifest: Path
) -> None:
    done = []
    for number, containers in enumerate(read_pods(manifest.read_text(), manifest.name).pods):
        with sandbox(node, kubepods, containers, number) as (cri, pod):
            done += [created(cri, pod, each, tmp_path, {}, ()) for each in containers]
    assert explained(shared_daemon.launch, manifest) == done
