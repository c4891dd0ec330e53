"""A small CRI client: what a kubelet asks of the runtime, as one method a verb. Safe to share between threads."""

import json
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NewType, Self, TypeVar

import grpc
from google.protobuf.message import Message
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu._pb.cri_pb2 import StopContainerRequest, StopContainerResponse
from tests.support._pb import cri_tests_pb2 as pb
from tests.support.errors import HarnessError
from tests.support.pods import ContainerSpec, PodSpec, container_to_pb, pod_to_pb

PodId = NewType("PodId", str)
ContainerId = NewType("ContainerId", str)
Reply = TypeVar("Reply", bound=Message)

CDI_KNOWN_S: Final = 5.0
CALL_TIMEOUT_S: Final = 60.0
# A string that the wire has as bytes that are no UTF-8, of the same length: Python's protobuf refuses to write such a
# string, and to read one. Go's CRI of some releases does both.
NOT_UTF8: Final = "<not UTF-8>"
NOT_UTF8_BYTES: Final = b"\xff" * len(NOT_UTF8)
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),  # bytes; a verbose status carries a whole OCI spec
    # A restarted containerd must be found again at once; gRPC's own first pause is a second.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class CriError(Exception):
    """The runtime answered an error. code: gRPC status name; details: the text that a kubelet would show."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod sandbox, with the configuration that each of its containers has to repeat."""

    id: PodId
    config: pb.PodSandboxConfig = field(repr=False)


class Executed(Struct, frozen=True):
    """A command that ran in a container."""

    code: int
    stdout: str
    stderr: str


class Status(Struct, frozen=True):
    """A container as the runtime describes it. oci: the final OCI spec, after every NRI plugin.

    finished_at: seconds since the epoch; 0 while it has not ended.
    """

    state: str
    finished_at: float
    exit_code: int
    reason: str
    pid: int
    annotations: Mapping[str, str]
    oci: Mapping[str, Any]  # the OCI runtime spec's own JSON

    @property
    def env(self) -> dict[str, str]:
        """The environment of the container's first process."""
        return dict(pair.split("=", 1) for pair in self.oci["process"]["env"])

    @property
    def device_paths(self) -> list[str]:
        """Device nodes beyond the runtime's default ones, in the spec's order."""
        return [device["path"] for device in self.oci["linux"].get("devices") or ()]


class Cri:
    """One connection to a runtime's CRI socket.

    cgroup_parent: below which cgroup the pods go, as a kubelet says for each; empty for the runtime's default.
    """

    def __init__(self, socket: Path, *, cgroup_parent: str = "") -> None:
        self._channel = grpc.insecure_channel(f"unix://{socket}", options=CHANNEL_OPTIONS)
        self._cgroup_parent = cgroup_parent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def version(self, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """The runtime's own version."""
        reply = self._call("Version", pb.VersionRequest(), pb.VersionResponse, timeout_s)
        return reply.runtime_version

    def has_image(self, name: str) -> bool:
        request = pb.ImageStatusRequest(image=pb.ImageSpec(image=name))
        return self._call("ImageStatus", request, pb.ImageStatusResponse, service="ImageService").HasField("image")

    def run_pod(self, spec: PodSpec | None = None) -> Pod:
        spec = spec or PodSpec()
        return self.run_pod_as(pod_to_pb(spec, self._cgroup_parent), spec.runtime_handler)

    def run_pod_as(self, config: pb.PodSandboxConfig, runtime_handler: str = "") -> Pod:
        """Of exactly this configuration."""
        request = pb.RunPodSandboxRequest(config=config, runtime_handler=runtime_handler)
        reply = self._call("RunPodSandbox", request, pb.RunPodSandboxResponse)
        return Pod(PodId(reply.pod_sandbox_id), config)

    def stop_pod(self, pod: PodId) -> None:
        self._call("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=pod), pb.StopPodSandboxResponse)

    def remove_pod(self, pod: PodId) -> None:
        """Remove a pod with all its containers, running or not."""
        self._call("RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=pod), pb.RemovePodSandboxResponse)

    def remove_pod_named(self, name: str) -> None:
        self.remove_pod(PodId(next(pod.id for pod in self.pods() if pod.metadata.name == name)))

    def pods(self) -> list[pb.PodSandbox]:
        return list(self._call("ListPodSandbox", pb.ListPodSandboxRequest(), pb.ListPodSandboxResponse).items)

    def create(self, pod: Pod, spec: ContainerSpec | None = None) -> ContainerId:
        """CreateContainer: where an NRI plugin adjusts, and where its refusal surfaces as a CriError.

        A CDI device that is not known yet is asked for again, as a kubelet does: containerd learns of a specification
        by inotify, a moment after it was written.
        """
        config, until = container_to_pb(spec or ContainerSpec()), time.monotonic() + CDI_KNOWN_S
        while True:
            try:
                return self.create_as(pod, config)
            except CriError as error:
                if "unresolvable CDI devices" not in error.details or time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def create_as(self, pod: Pod, config: pb.ContainerConfig) -> ContainerId:
        """The same, of exactly this configuration."""
        request = pb.CreateContainerRequest(pod_sandbox_id=pod.id, config=config, sandbox_config=pod.config)
        return ContainerId(self._call("CreateContainer", request, pb.CreateContainerResponse).container_id)

    def start(self, container: ContainerId, deadline_s: float | None = None) -> None:
        """deadline_s: that the runtime alone keeps, as for a caller that is too slow to cancel; None: none such."""
        request = pb.StartContainerRequest(container_id=container)
        self._call("StartContainer", request, pb.StartContainerResponse, deadline_s=deadline_s)

    def run(self, pod: Pod, spec: ContainerSpec | None = None) -> ContainerId:
        """Create and start."""
        container = self.create(pod, spec)
        self.start(container)
        return container

    def asking(self, claim: str, name: str = "pod", **fields: Any) -> Pod:  # noqa: ANN401
        """A new pod whose annotation makes this claim for all its containers; empty: none. fields: of its PodSpec."""
        return self.run_pod(PodSpec(name=name, annotations={"gpu.nri.io": claim} if claim else {}, **fields))

    def run_asking(self, claim: str, name: str = "pod", **fields: Any) -> ContainerId:  # noqa: ANN401
        """A container of such a pod, running. fields: of its ContainerSpec."""
        return self.run(self.asking(claim, name), ContainerSpec(**fields))

    def run_persistently(
        self, pod: Pod, spec: ContainerSpec, for_now: str, timeout_s: float = CALL_TIMEOUT_S
    ) -> ContainerId:
        """As a kubelet does: what is refused for now (by a pattern) is made anew."""
        until = time.monotonic() + timeout_s
        while True:
            container = None
            try:
                container = self.create(pod, spec)
                self.start(container)
            except CriError as error:
                if not re.search(for_now, error.details) or time.monotonic() > until:
                    raise
            else:
                return container
            if container:
                self.remove(container)
            spec = replace(spec, attempt=spec.attempt + 1)
            time.sleep(0.1)

    def refused(self, claim: str, name: str = "pod", **fields: Any) -> CriError:  # noqa: ANN401
        """Why there is no such container. Raises: AssertionError: there is."""
        try:
            container = self.run_asking(claim, name, **fields)
        except CriError as error:
            return error
        raise AssertionError(f"{claim!r} was not refused: {container}")

    def stop(self, container: ContainerId, timeout_s: int = 0) -> None:
        """Stop a container; after `timeout_s` seconds, by SIGKILL."""
        request = StopContainerRequest(container_id=container, timeout=timeout_s)
        self._call("StopContainer", request, StopContainerResponse)

    def remove(self, container: ContainerId) -> None:
        self._call("RemoveContainer", pb.RemoveContainerRequest(container_id=container), pb.RemoveContainerResponse)

    def containers(self) -> list[pb.Container]:
        return list(self._call("ListContainers", pb.ListContainersRequest(), pb.ListContainersResponse).containers)

    def status(self, container: ContainerId) -> Status:
        request = pb.ContainerStatusRequest(container_id=container, verbose=True)
        reply = self._call("ContainerStatus", request, pb.ContainerStatusResponse)
        status, info = reply.status, json.loads(reply.info["info"])
        return Status(
            state=pb.ContainerState.Name(status.state).removeprefix("CONTAINER_"),
            finished_at=status.finished_at / 1e9,
            exit_code=status.exit_code,
            reason=status.reason,
            pid=info.get("pid", 0),
            annotations=dict(status.annotations),
            oci=info["runtimeSpec"],
        )

    def execute(self, container: ContainerId, *command: str, timeout_s: int = 20) -> Executed:
        """Run a command in a container to its end. Any exit code is an answer, not an error."""
        request = pb.ExecSyncRequest(container_id=container, cmd=command, timeout=timeout_s)
        reply = self._call("ExecSync", request, pb.ExecSyncResponse)
        return Executed(reply.exit_code, reply.stdout.decode(errors="replace"), reply.stderr.decode(errors="replace"))

    def checkpoint(self, container: ContainerId, archive: Path) -> None:
        """Write a checkpoint of a running container, which runs on, to an archive."""
        request = pb.CheckpointContainerRequest(container_id=container, location=str(archive))
        self._call("CheckpointContainer", request, pb.CheckpointContainerResponse)

    def remove_all(self) -> None:
        """Stop and remove every pod, and with them every container.

        Raises: HarnessError: one of them had a hook. That none ever has is asked here, of all tests' containers.
        """
        hooked = {each.id: hooks for each in self.containers() if (hooks := self._hooks(ContainerId(each.id)))}
        if pods := [PodId(pod.id) for pod in self.pods()]:
            with ThreadPoolExecutor(min(len(pods), 8)) as pool:
                list(pool.map(self.remove_pod, pods))
        if hooked:
            raise HarnessError(f"containers had hooks: {hooked}")

    def _hooks(self, container: ContainerId) -> object:
        try:
            return self.status(container).oci.get("hooks")
        except CriError as gone:  # between the list and the question
            if gone.code != "NOT_FOUND":
                raise
            return None

    def _call(
        self,
        method: str,
        request: Message,
        reply: type[Reply],
        timeout_s: float = CALL_TIMEOUT_S,
        *,
        service: str = "RuntimeService",
        deadline_s: float | None = None,
    ) -> Reply:
        call: Callable[..., Reply] = self._channel.unary_unary(
            f"/runtime.v1.{service}/{method}",
            request_serializer=lambda sent: sent.SerializeToString().replace(NOT_UTF8.encode(), NOT_UTF8_BYTES),
            response_deserializer=lambda read: reply.FromString(read.replace(NOT_UTF8_BYTES, NOT_UTF8.encode())),
        )
        try:
            if deadline_s:
                return call(request, metadata=(("grpc-timeout", f"{deadline_s * 1000:.0f}m"),))
            return call(request, timeout=timeout_s)
        except grpc.RpcError as fault:
            # The exception is also the finished call, hence code() and details().
            raise CriError(fault.code().name, fault.details() or "") from None
