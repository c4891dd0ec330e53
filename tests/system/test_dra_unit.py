"""The DRA driver works in its unit's sandbox: the kubelet finds and calls it, and it asks the API server by HTTPS."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from nri_gpu.dra.daemon_socket import dra_service
from nri_gpu.dra.questions import DRA_SOCKET, OfferedDevice
from nri_gpu.system.server import listen
from tests.support import sandbox
from tests.support.api_server import StandInApiServer
from tests.support.dra_kubelet import DraKubelet
from tests.support.dra_node import TellingDaemon
from tests.support.kubeconfig import kubeconfig
from tests.support.resource_claims import DRIVER, resource_claim
from tests.support.serving import served
from tests.support.unit_file import OURS
from tests.support.waiting import wait_for

UNIT = OURS.with_name("nri-gpu-dra.service")
NODE = "node-1"


def kubelet_conf(folder: Path, api: StandInApiServer) -> Path:
    """As kubeadm writes the kubelet's, but in JSON: files for authority, certificate and key."""
    pem = api.certificates
    cluster = {"server": f"https://127.0.0.1:{api.port}", "certificate-authority": str(pem.authority)}
    user = {"client-certificate": str(pem.certificate), "client-key": str(pem.key)}
    path = folder / "kubelet.conf"
    path.write_text(json.dumps(kubeconfig(cluster, user)))
    return path


async def test_the_driver_serves_a_kubelet_in_the_units_sandbox(folder: Path) -> None:
    with StandInApiServer() as api:
        await _serves(folder, api)


async def _serves(folder: Path, api: StandInApiServer) -> None:
    state, cdi = folder / "state", folder / "cdi"
    state.mkdir()
    cdi.mkdir()
    api.add_node(NODE)
    daemon, claim = TellingDaemon(folder), resource_claim()
    api.claims["ml", "train"] = claim
    await daemon.change(devices=(OfferedDevice(name="gpu-0", attributes={"type": "gpu"}, capacity={}),))
    socket = state / DRA_SOCKET
    service = dra_service(socket, daemon.ask)
    options = ["--state-dir", state, "--kubeconfig", kubelet_conf(folder, api), "--node-name", NODE]
    program = [sys.executable, "-m", "nri_gpu", "dra", *map(str, options)]
    async with asyncio.timeout(60), served(listen(socket), service), DraKubelet(folder) as kubelet:
        rw = (kubelet.plugins, kubelet.registry, cdi)
        keep = (folder, api.certificates.authority.parent)
        process = await asyncio.create_subprocess_exec(
            *sandbox.command(program, rw=rw, keep=keep, unit=UNIT), cwd=sandbox.PROJECT
        )
        try:
            await kubelet.wait_for_driver(DRIVER)
            await asyncio.to_thread(wait_for, "a slice", lambda: "gpu-0" in api.devices(), 30)
            (prepared,) = (await kubelet.prepare(DRIVER, ("ml", "train", claim["metadata"]["uid"]))).values()
            assert [each.device_name for each in prepared] == ["gpu-0"]
            assert len(list(cdi.iterdir())) == 1
        finally:
            process.terminate()
            assert await process.wait() == 0
