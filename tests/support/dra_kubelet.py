"""A kubelet as far as a DRA driver can tell: it finds registration sockets, and prepares and unprepares claims.

It does what the reference says of kubelets: one endpoint is not registered twice, a driver whose registration socket
goes is dropped, every claim of a call must be answered, unprepare comes twice, calls end after 45 s.
Source: kubernetes/kubernetes pkg/kubelet/cm/dra (manager.go, plugin/), pkg/kubelet/pluginmanager.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from nri_gpu._pb import dra_pb2 as pb
from nri_gpu._pb import pluginregistration_pb2 as watcher
from nri_gpu._pb import pluginregistration_pb2_grpc as watcher_grpc
from nri_gpu.system.storage import Signature, signature

CALL_S = 45.0
WAIT_S = 10.0
KNOWN = {"v1.DRAPlugin": "v1", "v1beta1.DRAPlugin": "v1beta1"}
SERVICE = "/k8s.io.kubelet.pkg.apis.dra.{}.DRAPlugin/{}"
# Kubernetes -> versions of DRAResourceHealth that its kubelet knows, the newest first; before 1.37 it asks by v1alpha1
# whatever the driver says that it serves. Read in dra_plugin.go and dra_plugin_manager.go (above) of v1.34.4, v1.35.4,
# v1.36.3 and v1.37.2; in the first two the gate ResourceHealthStatus is off by default.
ASKED_ANYWAY = ("v1alpha1",)
HEALTH: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("1.34", "1.35", "1.36"), ASKED_ANYWAY),
    "1.37": ("v1", "v1alpha1"),
}


class ClaimFaultError(Exception):
    """FailedPrepareDynamicResources: what the pod's event says."""


@dataclass
class Driver:
    """One registered endpoint. found: the registration socket that led to it. served: as its registration says it."""

    name: str
    endpoint: Path
    version: str
    channel: Any
    found: Signature | None
    served: Sequence[str] = ()

    def health_service(self, release: str) -> str:
        """By which service that kubelet asks it for health; empty: by none, so that all of it is Unknown."""
        services = [f"{version}.DRAResourceHealth" for version in HEALTH[release]]
        return next((each for each in services if HEALTH[release] is ASKED_ANYWAY or each in self.served), "")


class DraKubelet:
    """versions: of the API that it knows, the newest first. refuse: why it refuses every driver; empty: it does not."""

    def __init__(self, folder: Path, versions: Sequence[str] = ("v1.DRAPlugin", "v1beta1.DRAPlugin")) -> None:
        self.plugins = folder / "plugins"
        self.registry = folder / "plugins_registry"
        self.versions = versions
        self.refuse = ""
        self.registered = self.refused = 0
        self.drivers: dict[Path, Driver] = {}  # by registration socket
        self._tried: dict[Path, Signature | None] = {}
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.plugins.mkdir(parents=True, exist_ok=True)
        self.registry.mkdir(parents=True, exist_ok=True)
        self._tried.clear()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for socket in list(self.drivers):
            await self._drop(socket)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Until something holds, looked at whenever a driver came or went."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"no {what} within {timeout_s} s; there is {list(self.drivers)}") from None

    async def wait_for_driver(self, name: str) -> Driver:
        await self.wait(f"driver {name}", lambda: any(each.name == name for each in self.drivers.values()))
        return self.driver(name)

    def driver(self, name: str) -> Driver:
        """The one that came last. Raises: ClaimFaultError."""
        found = [each for each in self.drivers.values() if each.name == name]
        if not found:
            raise ClaimFaultError(f"DRA driver {name} is not registered")
        return found[-1]

    async def answers(self, name: str, *claims: tuple[str, str, str]) -> dict[str, pb.NodePrepareResourceResponse]:
        """The bare answer to one prepare. claims: namespace, name and UID of each."""
        request = pb.NodePrepareResourcesRequest(claims=map(_claim, claims))
        answer = await self._call(name, "NodePrepareResources", request, pb.NodePrepareResourcesResponse)
        return dict(answer.claims)

    async def prepare(self, name: str, *claims: tuple[str, str, str]) -> dict[str, list[pb.Device]]:
        """The devices of each claim, by its UID. Raises: ClaimFaultError: the first error of any."""
        answers = await self.answers(name, *claims)
        for uid, answer in answers.items():
            if uid not in {each for _, _, each in claims}:
                raise ClaimFaultError(f"NodePrepareResources returned result for unknown claim UID {uid}")
            if answer.error:
                raise ClaimFaultError(f"NodePrepareResources failed for ResourceClaim {uid}: {answer.error}")
        if len(answers) != len(claims):
            raise ClaimFaultError(f"NodePrepareResources skipped {len(claims) - len(answers)} ResourceClaims")
        return {uid: list(answer.devices) for uid, answer in answers.items()}

    async def unprepare(self, name: str, *claims: tuple[str, str, str]) -> None:
        """Twice, as it may after a restart. Raises: ClaimFaultError."""
        for _ in range(2):
            request = pb.NodeUnprepareResourcesRequest(claims=map(_claim, claims))
            answer = await self._call(name, "NodeUnprepareResources", request, pb.NodeUnprepareResourcesResponse)
            assert set(answer.claims) == {uid for _, _, uid in claims}
            for each in answer.claims.values():
                if each.error:
                    raise ClaimFaultError(each.error)

    async def _call(self, name: str, method: str, request: Any, answer: Any) -> Any:  # noqa: ANN401 - generated
        driver = self.driver(name)
        call = driver.channel.unary_unary(
            SERVICE.format(driver.version, method),
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return await call(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise ClaimFaultError(f"{method}: {error.details()}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            raise ClaimFaultError(f"{method}: the driver was dropped meanwhile") from None

    async def _watch(self) -> None:
        """The plugin watcher and its reconciler: a socket that is another one than before is dialled anew."""
        while True:
            there = {each: signature(each) for each in self.registry.glob("[!.]*") if each.is_socket()}
            for path, driver in list(self.drivers.items()):
                if there.get(path) != driver.found:
                    await self._drop(path)
            for path, found in there.items():
                if self._tried.get(path) != found:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await self._found(path, found)
                        self._tried[path] = found
            await asyncio.sleep(0.02)

    async def _found(self, path: Path, found: Signature | None) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
            stub: Any = watcher_grpc.RegistrationStub(channel)
            info = await stub.GetInfo(watcher.InfoRequest(), timeout=1)
            if info.type != "DRAPlugin":
                return
            version = next((KNOWN[each] for each in info.supported_versions if each in self.versions), "")
            why = self.refuse or self._why_not(info, version)
            if not why:
                dialled = grpc.aio.insecure_channel(f"unix:{info.endpoint}", options=options)
                endpoint, served = Path(info.endpoint), tuple(info.supported_versions)
                self.drivers[path] = Driver(info.name, endpoint, version, dialled, found, served)
                self.registered += 1
            else:
                self.refused += 1
            status = watcher.RegistrationStatus(plugin_registered=not why, error=why)
            await stub.NotifyRegistrationStatus(status, timeout=WAIT_S)
        await self._tell()

    def _why_not(self, info: watcher.PluginInfo, version: str) -> str:
        if not version:
            return f"none of services supported by the plugin ({list(info.supported_versions)}) are supported"
        if any(each.endpoint == Path(info.endpoint) for each in self.drivers.values()):
            return f"endpoint {info.endpoint} already registered for DRA driver plugin {info.name}"
        return ""

    async def _drop(self, path: Path) -> None:
        await self.drivers.pop(path).channel.close()
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _claim(claim: tuple[str, str, str]) -> pb.Claim:
    namespace, name, uid = claim
    return pb.Claim(namespace=namespace, name=name, uid=uid)
