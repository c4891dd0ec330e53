"""Whatever comes by gRPC is read, or is the error of that peer in a sentence; a container gets only what is listed.

list, get, allocatable: answers of the kubelet's PodResources, on a real socket. given: as an observer reads them. cri:
why the runtime does not stop a container, likewise. prepare, unprepare: what the kubelet asks of the DRA driver.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, redirect_stdout
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from nri_gpu._pb import dra_pb2, podresources_pb2
from nri_gpu.domain.allocation import PodDevices
from nri_gpu.dra.api_access import Access
from nri_gpu.dra.api_server import ApiServer, NotFoundError
from nri_gpu.dra.claim_cdi import ClaimSpecifications
from nri_gpu.dra.claim_service import ClaimService
from nri_gpu.dra.daemon_client import DaemonClient
from nri_gpu.dra.node_events import NodeEvents
from nri_gpu.dra.preparation import ClaimPreparation, ClaimTimes
from nri_gpu.dra.questions import Answer, AskPrepare, AskView, NodeView, Prepared, Question, Unprepared
from nri_gpu.kubelet.podresources import PodResources, PodResourcesError
from nri_gpu.observe.kubelet_devices import given_of, printed
from nri_gpu.observe.resolve import resolved
from nri_gpu.system import container_stops as cri_child
from tests.fuzz.messages import changed, mutated_bytes
from tests.fuzz.target import Target, chosen, named, scratch
from tests.support.builders import gpu, inventory, mig_gpu, uuid
from tests.support.cri_server import CriServer
from tests.support.kubelet_nodes import GPU, ExternalNode, of_plugin
from tests.support.resource_claims import DRIVER, NODE, UID, document, resource_claim

T = TypeVar("T")
ACCESS = Access(host="localhost", port=1)  # nobody is asked
FOLDER: Final = scratch()
LOOP: Final = asyncio.new_event_loop()
POD: Final = ("ml", "train")
CLAIM: Final = ("ml", "train")
CODES: Final = tuple(grpc.StatusCode)[1:]  # all but OK
TIMES: Final = ClaimTimes(api_server=1.0, daemon=1.0, again=0.001, passing=0.002)
logging.getLogger("grpc").setLevel(logging.CRITICAL)  # it logs a traceback of each message that protobuf cannot read


@asynccontextmanager
async def _kubelet(answer: bytes) -> AsyncIterator[PodResources]:
    """A client of a kubelet that answers everything with these bytes."""

    async def say(*_: object) -> bytes:
        return answer

    methods = dict.fromkeys(("List", "Get", "GetAllocatableResources"), grpc.unary_unary_rpc_method_handler(say))
    server: Any = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", methods),))
    socket = FOLDER / "kubelet.sock"
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    client = PodResources(socket)
    try:
        yield client
    finally:
        await client.close()
        await server.stop(None)
        socket.unlink(missing_ok=True)


def _answered(data: bytes, ask: Callable[[PodResources], Awaitable[T]]) -> T | None:
    """What the client makes of these bytes; None for an error of the kubelet."""

    async def run() -> T:
        async with _kubelet(data) as client:
            return await ask(client)

    try:
        return LOOP.run_until_complete(run())
    except PodResourcesError as error:
        assert str(error).isprintable()
        return None


def pods(data: bytes) -> bool:
    listed = _answered(data, lambda client: client.list())
    return listed is not None and _granted(listed)


def pod(data: bytes) -> bool:
    found = _answered(data, lambda client: client.get(*POD))
    assert not found or (found.namespace, found.name) == POD
    return found is not None and _granted((found,))


def allocatable(data: bytes) -> bool:
    return bool(_answered(data, lambda client: client.allocatable()))


def given(data: bytes) -> bool:
    """What an observer's child prints of it, and which GPUs of its node these are."""
    node = inventory([gpu(0), mig_gpu(1)])
    devices = given_of(printed(podresources_pb2.ListPodResourcesResponse.FromString(data)), 0.0).devices
    found = [resolved(device, node) for each in devices.values() for device in each]
    assert all(uuids <= {unit.uuid for unit in node.units} for uuids in found)
    return any(found)


def _granted(listed: tuple[PodDevices, ...]) -> bool:
    """Whether a container that names two GPUs gets them; it may get only what is listed for it."""
    node, container = ExternalNode(), of_plugin(0, 1)
    node.sandbox_created(container)
    node.pods.put_list(node.pods.all(), listed)
    node.plugin.kubelet_listed(listed)
    node.pods.settled = True
    got = node.create(container)
    if isinstance(got, str):
        assert got.isprintable()
        return False
    mine = [each for each in listed if (each.namespace, each.name) == POD]
    assert len(mine) < 2 or not got
    assert set(got) <= {device.uuid for each in mine for device in each.devices}
    return bool(got)


def cri(data: bytes) -> bool:
    """The number of a code, and what is said with it."""
    code, said = CODES[(data or b"\0")[0] % len(CODES)], data[1:].decode(errors="ignore")
    socket, output = FOLDER / "cri.sock", io.StringIO()
    with CriServer(socket, {"stuck": (code, said)}), redirect_stdout(output):
        cri_child.main([str(socket), "0", "5"], ["stuck", "other"])
    socket.unlink(missing_ok=True)
    found = dict(cri_child.outcomes(output.getvalue()))
    assert found.keys() == {"stuck", "other"}
    assert (found["stuck"] == cri_child.DONE) == (code is grpc.StatusCode.NOT_FOUND)
    assert found["other"] == cri_child.DONE
    return found["stuck"] == cri_child.DONE


class _Daemon(DaemonClient):
    """It prepares whatever it is asked to."""

    async def ask(self, question: Question) -> Answer:
        match question:
            case AskView():
                return NodeView(number=1, driver=DRIVER, dir="", registry_dir="", cdi_dir="", known=True)
            case AskPrepare(claim=claim):
                return Prepared(tuple((f"NRI_GPU_CLAIM_{at}", "v1") for at, _ in enumerate(claim.results)), True)
            case _:
                return Unprepared()


class _OneClaim(ApiServer):
    async def claim(self, namespace: str, name: str) -> bytes:
        if (namespace, name) != CLAIM:
            raise NotFoundError("there is none")
        return document(resource_claim())


def _service() -> ClaimService:
    folder = FOLDER / "cdi"
    return ClaimService(
        ClaimPreparation(_Daemon(FOLDER), _OneClaim(ACCESS), ClaimSpecifications(folder), DRIVER, NODE, TIMES),
        NodeEvents(_OneClaim(ACCESS), NODE).claim_failed,
    )


def prepare(data: bytes) -> bool:
    return _served(dra_pb2.NodePrepareResourcesRequest.FromString(data), _service().prepare)


def unprepare(data: bytes) -> bool:
    return _served(dra_pb2.NodeUnprepareResourcesRequest.FromString(data), _service().unprepare)


def _served(request: Any, method: Callable[[Any, Any], Coroutine[Any, Any, Any]]) -> bool:  # noqa: ANN401 - protobuf's own
    """Whether a claim of the request was served."""
    answer = LOOP.run_until_complete(method(request, None))
    _check_claims(request.claims, answer.claims)
    return any(not each.error for each in answer.claims.values())


def _check_claims(asked: Any, answers: Any) -> None:  # noqa: ANN401 - protobuf's own
    assert {each.uid for each in asked} == set(answers)
    for each in answers.values():
        assert each.error.isprintable()
        assert "a bug" not in each.error
    assert {path.name for path in FOLDER.rglob("*")} <= {"cdi", f"nri-gpu-claim-{UID}.json"}


def _messages_only(read: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
    """GRPC answers what protobuf cannot read, before it comes to us."""

    def check(data: bytes) -> bool:
        try:
            return read(data)
        except DecodeError:
            return False

    return check


KINDS: Final[dict[str, type[Message]]] = {
    "list": podresources_pb2.ListPodResourcesResponse,
    "get": podresources_pb2.GetPodResourcesResponse,
    "allocatable": podresources_pb2.AllocatableResourcesResponse,
    "given": podresources_pb2.ListPodResourcesResponse,
    "prepare": dra_pb2.NodePrepareResourcesRequest,
    "unprepare": dra_pb2.NodeUnprepareResourcesRequest,
}


def mutate(data: bytes, bytes_max: int, seed: int) -> bytes:
    """A field of the message; sometimes its bytes."""
    dice = random.Random(seed)
    name, _, rest = data.partition(b"\n")
    kind = KINDS.get(name.decode(errors="replace"))
    if kind is None or dice.random() < 0.15:
        return mutated_bytes(data, bytes_max)
    return (name + b"\n" + changed(kind, rest, dice))[:bytes_max]


def _listed() -> podresources_pb2.PodResources:
    devices = [podresources_pb2.ContainerDevices(resource_name=GPU, device_ids=[uuid(at)]) for at in (0, 1)]
    container = podresources_pb2.ContainerResources(name="main", devices=devices)
    return podresources_pb2.PodResources(namespace=POD[0], name=POD[1], containers=[container])


def _asked_for(uid: str) -> bytes:
    claims = [dra_pb2.Claim(namespace=CLAIM[0], name=CLAIM[1], uid=uid)]
    return dra_pb2.NodePrepareResourcesRequest(claims=claims).SerializeToString()


READERS: Final[dict[str, Callable[[bytes], object]]] = {
    "list": pods,
    "get": pod,
    "allocatable": allocatable,
    "given": _messages_only(given),
    "cri": cri,
    "prepare": _messages_only(prepare),
    "unprepare": _messages_only(unprepare),
}
GRPC: Final = Target(
    chosen(READERS),
    good=[
        *named("list", podresources_pb2.ListPodResourcesResponse(pod_resources=[_listed()]).SerializeToString()),
        *named("get", podresources_pb2.GetPodResourcesResponse(pod_resources=_listed()).SerializeToString()),
        *named(
            "allocatable",
            podresources_pb2.AllocatableResourcesResponse(devices=_listed().containers[0].devices).SerializeToString(),
        ),
        *named("given", podresources_pb2.ListPodResourcesResponse(pod_resources=[_listed()]).SerializeToString()),
        *named("prepare", _asked_for(UID)),
        *named("unprepare", _asked_for(UID)),
        *named("cri", bytes([CODES.index(grpc.StatusCode.NOT_FOUND)])),
    ],
    bad=[
        *(each for name in KINDS for each in named(name, b"", b"\xff\xff", b"\x0a\x03\xff\xff\xff")),
        *named("list", podresources_pb2.ListPodResourcesResponse(pod_resources=[_listed()] * 2).SerializeToString()),
        *named("cri", "\x01it will\nnot die\u2028stuck ok", b"\x02"),
        *named("prepare", _asked_for("../../etc/passwd"), _asked_for("\u2028"), _asked_for("")),
    ],
    pieces=(
        *READERS,
        *(*POD, *CLAIM, GPU, "main", uuid(0), uuid(1), uuid(2), UID, "::0", "MIG-", "../", "/", "\0", "\x1c", "\u2028"),
    ),
    mutate=mutate,
    bytes_max=1 << 15,
)
TARGETS: Final = {"grpc": GRPC}
