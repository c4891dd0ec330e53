"""`nri-gpu explain` says of pods with limits or claims what the daemon does with them once these are allocated.

All pods of `test_explain`, and more that are limited to GPUs, before a daemon that is the device plugin; and pods with
ResourceClaims before one that serves `nri-gpu dra`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest

from nri_gpu.cli.pod_manifest import TEMPLATE, ClaimObject, ClaimUse, Manifest, ManifestContainer, read_pods
from tests.conformance.conftest import launch_on
from tests.conformance.test_dra import Named, Site, site_on
from tests.conformance.test_explain import MANIFESTS, POLICY, Outcome, created, explained, sandbox
from tests.support.containerd import Containerd
from tests.support.cri import Cri, Pod
from tests.support.daemon import UUIDS, NriGpu, staged
from tests.support.kubelet import AdmissionError, Kubelet
from tests.support.marks import on_newest
from tests.support.podresources import PodResourcesServer
from tests.support.resource_claims import NODE, resource_claim, result
from tests.support.scripted_runtime import until
from tests.support.waiting import aside, in_a_loop

pytestmark = on_newest

LIMITED = sorted(MANIFESTS[0].parent.glob("kubelet/*.yaml"))
GPU: Final = "nvidia.com/gpu"


@pytest.fixture
def allocating(node: Containerd, tmp_path: Path, folder: Path) -> Iterator[NriGpu]:
    """A daemon that is the device plugin of the kubelet on `folder`."""
    sockets = f'dir = "{folder}/device-plugins"\npodresources = "{folder}/pod-resources/kubelet.sock"\n'
    policy = f'{POLICY}[kubelet]\nenabled = true\n{sockets}cdi_dir = "{node.layout.cdi}"\n'
    with staged(launch_on(node, tmp_path).with_policy(policy)) as daemon:
        yield daemon


async def persistently(
    cri: Cri, pod: Pod, listed: ManifestContainer, volume: Path, tokens: Mapping[str, str], cdi: Sequence[str]
) -> Outcome:
    """The same as `created`, tried again while the daemon waits for PodResources, or for a claim that is read again."""
    loop = asyncio.get_running_loop()
    until = loop.time() + 30
    while True:
        outcome = await aside(created, cri, pod, listed, volume, tokens, cdi)
        if outcome.code != "node-not-ready" or loop.time() > until:
            return outcome
        await asyncio.sleep(0.1)


async def admitted(kubelet: Kubelet, listing: PodResourcesServer, containers: tuple[ManifestContainer, ...]) -> str:
    """The kubelet allocates to a pod and lists it; else the code that `explain` has for what it does not admit."""
    of = containers[0].container.pod
    try:
        await kubelet.admit_pod(of.id, [(each.container.name, each.resources, each.ends) for each in containers])
    except AdmissionError:
        most = max(each.resources.get(GPU, 0) for each in containers)
        return "gpu-busy" if most <= kubelet.capacity(GPU) else "no-such-gpu"
    names = [each.container.name for each in containers if not each.ends]
    given = {name: {key: ids for key, (ids, _) in kubelet.checkpoint[of.id, name].items()} for name in names}
    listing.give(of.name, given, of.namespace)
    return ""


@pytest.mark.parametrize("manifest", [*LIMITED, *MANIFESTS], ids=lambda path: path.stem)
@in_a_loop
async def test_the_same_answer(
    node: Containerd, allocating: NriGpu, kubepods: str, folder: Path, tmp_path: Path, manifest: Path
) -> None:
    done: list[Outcome] = []
    past_kubelet: set[str] = set()  # GPUs
    pods = read_pods(await aside(manifest.read_text), manifest.name).pods
    async with Kubelet(folder) as kubelet, PodResourcesServer(folder) as listing:
        for number, containers in enumerate(pods):
            await kubelet.wait_healthy(GPU, len(UUIDS) - len(past_kubelet))
            if code := await admitted(kubelet, listing, containers):
                done += [Outcome("refuse", code)] * len(containers)
                continue
            with sandbox(node, kubepods, containers, number) as (cri, pod):
                for each in containers:
                    tokens = kubelet.replayed(each.container.pod.id, each.container.name)
                    cdi = kubelet.cdi_devices if tokens else ()
                    outcome = await persistently(cri, pod, each, tmp_path, tokens, cdi)
                    done.append(outcome)
                    past_kubelet.update(outcome.gpu_uuids if not tokens and not each.ends else ())
    assert await aside(explained, allocating.launch, manifest) == done


class Scheduler:
    """It gives a claim the first devices that nobody has, in the order of the slices."""

    def __init__(self, site: Site, manifest: Manifest) -> None:
        self._site = site
        self._specs: dict[ClaimObject, Any] = dict(manifest.claims)
        self._taken: set[str] = set()
        self._claims: dict[tuple[object, ...], Named] = {}

    def uses(self, listed: ManifestContainer) -> tuple[ClaimUse, ...]:
        """A container's claims, and those that a DeviceClass with an extendedResourceName makes of its limits."""
        made = []
        for count in listed.resources.values():
            made.append(ClaimUse((TEMPLATE, "", str(count)), listed.container.id, ""))
            self._specs[made[-1].found] = {"requests": [{"name": "limits", "exactly": {"count": count}}]}
        return (*listed.claims, *made)

    def allocate(self, use: ClaimUse, pod: str, name: str) -> Named | None:
        """The claim that a pod's container names; None where too few devices are free."""
        key = (use.found, pod, use.entry) if use.found[0] == TEMPLATE else (use.found,)
        server = self._site.server
        if key in self._claims:
            reserved = server.claims["ml", self._claims[key][1]]["status"]["reservedFor"]
            reserved += [] if pod in str(reserved) else [{"resource": "pods", "name": name, "uid": pod}]
            return self._claims[key]
        free = [each["name"] for each in server.devices().values() if not each.get("taints")]
        free, results = [each for each in free if each not in self._taken], []
        for request in self._specs[use.found]["requests"]:
            for _ in range(request["exactly"].get("count", 1)):
                if not free:
                    return None
                results.append(result(free.pop(0), request["name"], pool=NODE))
        self._taken.update(each["device"] for each in results)
        config = [{**each, "source": "FromClaim"} for each in self._specs[use.found].get("config", ())]
        called = "ml", f"claim-{len(self._claims)}", str(uuid4())
        server.claims["ml", called[1]] = resource_claim(
            *results, uid=called[2], name=called[1], config=config, pods={pod: name}
        )
        self._claims[key] = called
        return called


@pytest.mark.parametrize("path", sorted(MANIFESTS[0].parent.glob("claims/*.yaml")), ids=lambda path: path.stem)
@in_a_loop
async def test_the_same_answer_with_claims(
    node: Containerd, kubepods: str, folder: Path, tmp_path: Path, path: Path
) -> None:
    manifest = read_pods(await aside(path.read_text), path.name)
    done: list[Outcome] = []
    past_claims: set[str] = set()  # GPUs

    def tainted() -> bool:
        return sum("taints" in each for each in site.server.devices().values()) == len(past_claims)

    async with site_on(node, tmp_path, folder, POLICY) as site:
        scheduler = Scheduler(site, manifest)
        for number, containers in enumerate(manifest.pods):
            uid, name = str(uuid4()), containers[0].container.pod.name
            await until("taints", tainted)
            claims = {use: scheduler.allocate(use, uid, name) for each in containers for use in scheduler.uses(each)}
            if None in claims.values():
                done += [Outcome("refuse", "gpu-busy")] * len(containers)
                continue
            cdi = {use: await site.prepare(claim, use.request) for use, claim in claims.items() if claim}
            with sandbox(node, kubepods, containers, number, uid) as (cri, pod):
                for each in containers:
                    names = [name for use in scheduler.uses(each) for name in cdi[use]]
                    outcome = await persistently(cri, pod, each, tmp_path, {}, names)
                    done.append(outcome)
                    past_claims.update(() if names or each.ends else outcome.gpu_uuids)
    assert await aside(explained, site.daemon.launch, path) == done
