"""Whatever the runtime's bytes ask of the plugin or of the guard, every request has one answer that a runtime can read.

And: no answer is a bug's, no refusal is longer than its limit, no Synchronize is answered RESOURCE_EXHAUSTED, nothing
is granted but nodes of this node's GPUs, and no GPU is exclusively two pods' at once.

An input is the stream of an NRI socket, from its first byte; the mutations change one request of it by its protobuf.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from google.protobuf.message import Message
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.decision import REFUSAL_MAX
from nri_gpu.domain.errors import RemoteProtocolError
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.counts import Failure
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.guard import Guard
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.plugin.nri_service import EVENT_METHODS, PLUGIN, NriHandlers, PluginService
from nri_gpu.plugin.request_sizes import Sizes
from nri_gpu.policy.model import Policy
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.request.annotation import CLAUSES, WORDS
from nri_gpu.system.state import NodeState
from nri_gpu.ttrpc import (
    PLUGIN_SERVICE,
    Mux,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseSent,
    SendOversizeError,
    StatusCode,
)
from tests.fuzz.messages import changed, mutated_bytes
from tests.fuzz.target import Target
from tests.support import nri_messages as nri
from tests.support.plugin import KEY, Clock, NoRecorder, node

NODE: Final = node()
OUR_NODES: Final = frozenset({"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"})
# What each method is asked with and answered with.
MESSAGES: Final[Mapping[str, tuple[type[Message], type[Message]]]] = {
    "Configure": (pb.ConfigureRequest, pb.ConfigureResponse),
    "Synchronize": (pb.SynchronizeRequest, pb.SynchronizeResponse),
    "CreateContainer": (pb.CreateContainerRequest, pb.CreateContainerResponse),
    "ValidateContainerAdjustment": (pb.ValidateContainerAdjustmentRequest, pb.ValidateContainerAdjustmentResponse),
    "StateChange": (pb.StateChangeEvent, pb.Empty),
    "UpdateContainer": (pb.UpdateContainerRequest, pb.UpdateContainerResponse),
    "Shutdown": (pb.Empty, pb.Empty),
    **dict.fromkeys(EVENT_METHODS, (pb.StopContainerRequest, pb.Empty)),
}


class Ends(Struct, frozen=True):
    """The plugin's side: what serves, and what is to hold at every moment."""

    service: PluginService
    handlers: NriHandlers
    check: Callable[[], None]


def plugin() -> Ends:
    """The daemon's, on a node with four GPUs."""
    state = NodeState(Inventory(taken_at=0), policy=Policy.default(), later=_now)
    state.node = NODE
    clock = Clock()
    handlers = Plugin(state, PluginDependencies(clock, _now, NoRecorder(), lambda: 0.0, stage_dir="/staged"), KEY)
    return Ends(_service(handlers), handlers, lambda: _check_ledger(handlers.ledger))


def guard() -> Ends:
    """The guard's, which reads the daemon's key and policy."""

    class Known:
        def key(self) -> bytes:
            return KEY

        def policy(self) -> Policy:
            return POLICY

        def revoked(self) -> tuple[ContainerId, ...]:
            return ()

    handlers = Guard(Known(), _now)
    return Ends(_service(handlers), handlers, lambda: None)


POLICY: Final = Policy.default()


def _now(action: Callable[[], None]) -> None:
    action()


def _service(handlers: NriHandlers) -> PluginService:
    return PluginService(handlers, lambda _: None, lambda: None, Sizes(PluginSettings, _now))


def check(data: bytes, make: Callable[[], Ends]) -> bool:
    """Whether all of it was understood."""
    ends, mux = make(), Mux.for_plugin()
    good = True
    try:
        for conn_id, event in mux.feed(data):
            match event:
                case RequestReceived():
                    response = ends.service.answer(event)
                    assert _send(mux, response)
                    good &= _check_answer(event, response)
                    ends.check()
                    assert not ends.handlers.counts.failures[Failure.BUG], event.method
                case RequestRejected():
                    mux.send(conn_id, event)
                    good = False
    except RemoteProtocolError:
        good = False
    ends.service.ended()
    return good


def _send(mux: Mux, response: ResponseSent) -> bytes:
    try:
        return mux.send(PLUGIN_SERVICE, response)
    except SendOversizeError:
        raise AssertionError(f"an answer of {len(response.payload)} bytes") from None


def _check_answer(request: RequestReceived, response: ResponseSent) -> bool:
    """Whether the request did what it asked for."""
    if not response.status.ok:
        said = response.status.message
        assert len(said) <= REFUSAL_MAX + len(request.method) + len(request.service)
        assert not said.startswith("nri-gpu") or (said.isascii() and said.isprintable())
        assert request.method != "Synchronize" or response.status.code != StatusCode.RESOURCE_EXHAUSTED
        return False
    answer = MESSAGES.get(request.method, (pb.Empty, pb.Empty))[1].FromString(response.payload)
    if isinstance(answer, pb.CreateContainerResponse):
        for device in answer.adjust.linux.devices:
            name = device.path.removeprefix("/dev/")
            assert name in OUR_NODES or name.removeprefix("nvidia") in {"0", "1", "2", "3"}, device
        for mount in answer.adjust.mounts:
            assert mount.source.startswith("/staged/"), mount
    return True


def _check_ledger(ledger: Ledger) -> None:
    held: defaultdict[str, set[tuple[str, Mode | None]]] = defaultdict(set)
    for entry in ledger.entries.values():
        if entry.holds:
            for uuid in entry.grant.uuids:
                held[uuid].add((entry.grant.pod_uid, entry.grant.mode))
    for by in held.values():
        modes = {mode for _, mode in by}
        assert Mode.EXCLUSIVE not in modes or len({pod for pod, _ in by}) == 1, by


def session(*requests: tuple[str, bytes]) -> bytes:
    """The bytes by which a runtime asks these."""
    return b"".join(_wire((PLUGIN, method, payload) for method, payload in requests))


def _wire(requests: Iterator[tuple[str, str, bytes]]) -> Iterator[bytes]:
    mux = Mux.for_runtime()
    for service, method, payload in requests:
        number = mux[PLUGIN_SERVICE].next_stream_id
        yield mux.send(PLUGIN_SERVICE, RequestSent(number, service, method, payload, nri.REQUEST_TIMEOUT_NS))


def mutate(data: bytes, bytes_max: int, seed: int) -> bytes:
    """One request changed, doubled, dropped, moved or sent to another method; sometimes bytes of the stream."""
    dice = random.Random(seed)
    requests = [event for event in _received(data) if event.service and event.method]
    if not requests or dice.random() < 0.15:
        return mutated_bytes(data, bytes_max)
    at = dice.randrange(len(requests))
    one = requests[at]
    match dice.randrange(12):
        case 0:
            del requests[at]
        case 1:
            requests.insert(dice.randrange(len(requests) + 1), one)
        case 2:
            requests[at] = replace(one, method=dice.choice([*MESSAGES, "RunPodSandbox2"]))
        case 3:
            requests[at] = replace(one, payload=mutated_bytes(one.payload, 5000))
        case 4:
            dice.shuffle(requests)
        case _:
            kind = MESSAGES.get(one.method, (pb.CreateContainerRequest, pb.Empty))[0]
            requests[at] = replace(one, payload=changed(kind, one.payload, dice))
    if (
        sum(len(each.payload) for each in requests) > bytes_max
    ):  # doubled lists in doubled messages; a frame has a limit
        return data[:bytes_max]
    out = b"".join(_wire((each.service, each.method, each.payload) for each in requests))
    return out if len(out) <= bytes_max else data[:bytes_max]


def _received(data: bytes) -> Iterator[RequestReceived]:
    try:
        yield from (event for _, event in Mux.for_plugin().feed(data) if isinstance(event, RequestReceived))
    except RemoteProtocolError:
        return


def _lives() -> Iterator[bytes]:
    """Containers that come, run and go, as each version of NRI tells it."""
    pod, other = nri.asking("2;mode=exclusive"), nri.asking("device=0,1;mode=shared;capabilities=utility", "other")
    made, others = nri.container(pod), nri.container(other)
    of_claim = nri.container(
        pod, "claim", env=["NRI_GPU_CLAIM_A_0=v1;claim=a;device=0;mac=00", "NVIDIA_REQUIRE_CUDA=cuda>=12"]
    )
    for flavour in nri.FLAVOURS.values():
        start = nri.event(Event.START_CONTAINER, pod, made, own_rpc=flavour.own_rpcs)
        ends = [
            nri.event(kind, pod, made, own_rpc=flavour.own_rpcs)
            for kind in (Event.STOP_CONTAINER, Event.REMOVE_CONTAINER)
        ]
        gone = nri.event(Event.REMOVE_POD_SANDBOX, pod, own_rpc=flavour.own_rpcs)
        yield session(
            ("Configure", nri.configure(flavour)),
            *(("Synchronize", part) for part in nri.synchronize([other], [nri.running(others)], 2)),
            nri.event(Event.RUN_POD_SANDBOX, pod, own_rpc=flavour.own_rpcs),
            ("CreateContainer", nri.create(pod, nri.container(nri.pod("plain")))),
            ("CreateContainer", nri.create(pod, made)),
            ("CreateContainer", nri.create(other, others)),
            ("CreateContainer", nri.create(pod, of_claim)),
            ("ValidateContainerAdjustment", nri.validate(pod, made, {})),
            start,
            *ends,
            gone,
        )


def _quiet() -> bytes:
    """A session in which nobody asks: all of it is understood by both ends."""
    pod = nri.pod("plain")
    return session(
        ("Configure", nri.configure(nri.NRI_0_12)),
        ("Synchronize", b""),
        ("CreateContainer", nri.create(pod, nri.container(pod))),
        nri.event(Event.STOP_CONTAINER, pod, nri.container(pod)),
    )


def _target(make: Callable[[], Ends]) -> Target:
    return Target(
        lambda data: check(data, make),
        good=[_quiet()],
        bad=[*_lives(), session(("CreateContainer", b"")), session(("Configure", b"\xff"))],
        pieces=(
            *WORDS,
            *CLAUSES,
            *("gpu.nri.io/pod", "gpu.nri.io/container.main", "gpu.nri.io/grant", "gpu.nri.io/kubelet.nvidia.com_gpu"),
            *("NVIDIA_VISIBLE_DEVICES=", "NVIDIA_DRIVER_CAPABILITIES=", "NVIDIA_REQUIRE_CUDA=", "NRI_GPU_CLAIM_"),
            *("/dev/nvidia0", "/staged/", "all"),
            *("v1;mode=exclusive;uuid=GPU-", ";gen=x;mac=", "nvidia.com/gpu=0", ",", ";", "=", ":"),
        ),
        mutate=mutate,
        bytes_max=1 << 16,
    )


TARGETS: Final = {"nri-plugin": _target(plugin), "nri-guard": _target(guard)}
