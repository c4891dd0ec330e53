"""A runtime that breaks every rule of the wire, and a real daemon and guard, each a process on a socket of its own.

After each attack the process must be alive, connect again, go through a whole registration, and answer a proper
request in time: the daemon grants all GPUs of the node to one container, so none was lost and none is held twice.
Its memory and descriptors must be what they were, within RSS_GROWTH_MIB and DESCRIPTORS_GROWTH.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event
from nri_gpu.ttrpc import PLUGIN_SERVICE, ConnId
from nri_gpu.ttrpc.frames import HEADER, FrameType
from nri_gpu.ttrpc.mux import HEADER as MUX_HEADER
from tests.reliability.result import Found, Options, Row
from tests.reliability.victim import CONNECTS_S, GPUS, Victim
from tests.support import nri_messages as nri
from tests.support.daemon import Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.errors import HarnessError
from tests.support.guard import NriGuard
from tests.support.scripted_runtime import Listener, ScriptedRuntime


class Attack(Struct, frozen=True):
    """One row. do: attacks, with so many repetitions, and says what came of it. often, quick: how many of `unit`.

    said: what the log has to say; empty where nothing is worth a line.
    """

    what: str
    do: Callable[[Victim, int, random.Random], Awaitable[str]]
    often: int
    quick: int
    unit: str
    said: str = ""


def frame(data: bytes, stream_id: int = 1, kind: int = FrameType.REQUEST) -> bytes:
    return HEADER.pack(len(data), stream_id, kind, 0) + data


def mux(payload: bytes, conn_id: ConnId = PLUGIN_SERVICE) -> bytes:
    return MUX_HEADER.pack(conn_id, len(payload)) + payload


def asking(runtime: ScriptedRuntime, name: str = "attack") -> bytes:
    pod = nri.asking("1", name)
    return runtime.request("CreateContainer", nri.create(pod, nri.container(pod)))


async def _thrown(victim: Victim, data: bytes) -> None:
    """These bytes, after a registration; then the connection ends, by either side."""
    runtime = await victim.connected()
    with suppress(HarnessError, OSError):
        await runtime.write(data)
        runtime.finish_writing()
        await runtime.ended()
    runtime.close()


async def truncated(victim: Victim, often: int, dice: random.Random) -> str:
    """At as many places, spread over all its bytes."""
    runtime = await victim.connected()
    wire = asking(runtime)
    runtime.close()
    for number in range(often):
        await _thrown(victim, wire[: 1 + (len(wire) - 1) * number // often])
    return f"of a request of {len(wire)} bytes; each ended its connection alone"


async def garbage(victim: Victim, often: int, dice: random.Random) -> str:
    for _ in range(often):
        await _thrown(victim, dice.randbytes(dice.choice((1, 100, 10_000, 100_000))))
    return "each ended its connection"


async def at_once(victim: Victim, often: int, dice: random.Random) -> str:
    """All requests before one answer is read: as many streams; each is answered once, and no GPU is given twice."""
    runtime = await victim.connected()
    await victim.serves(runtime)  # what earlier attacks were granted is held anew for 2 s after each connection
    for number in range(often):
        await runtime.write(asking(runtime, f"once-{number}"))
    answers = await runtime.answers(often)
    runtime.close()
    if len({each.stream_id for each in answers}) != often:
        raise HarnessError("a stream was answered twice")
    replies = [pb.CreateContainerResponse.FromString(each.payload) for each in answers if each.status.ok]
    given = [node.path for reply in replies for node in reply.adjust.linux.devices if node.path[-1:].isdigit()]
    if len(set(given)) != len(given):
        raise HarnessError(f"a GPU was given twice: {given}")
    if victim.grants and len(given) != GPUS:
        raise HarnessError(f"{len(given)} GPUs were given, of {GPUS}")
    return f"{often} answers, {len(given)} of them a GPU each, no GPU twice"


async def unknown(victim: Victim, often: int, dice: random.Random) -> str:
    """Methods, services, frame types, flags, even and used stream ids, connections of the mux."""
    runtime = await victim.connected()
    for number in range(often):
        reply = await runtime.call(("UpdatePod", "Exec", "\u2028", "x" * 9000)[number % 4], dice.randbytes(100))
        if reply.status.ok:
            raise HarnessError("a method that nobody has was answered")
        odd = (
            mux(frame(b"", kind=9)),
            mux(frame(b"x", kind=FrameType.RESPONSE)),
            mux(b"anything", conn_id=ConnId(77)),
            mux(b""),
        )
        await runtime.write(odd[number % len(odd)])
    await runtime.ask("StateChange")
    runtime.close()
    return "each answered with a status or ignored, on one connection"


async def used_ids(victim: Victim, often: int, dice: random.Random) -> str:
    runtime = await victim.connected()
    await runtime.ask("StateChange")
    for number in range(often):
        await runtime.write(mux(frame(b"\x0a\x01s\x12\x01m", stream_id=(1, 3, 2, 0)[number % 4])))
    await runtime.ask("StateChange")
    runtime.close()
    return "each rejected alone"


async def future(victim: Victim, often: int, dice: random.Random) -> str:
    """Fields and enum values of an NRI that nobody has written yet, in every message."""
    runtime = await victim.connected()
    more = b"\xa2\x38\x03new" + b"\xa8\x38\x07"  # fields 900 (bytes) and 901 (a number)
    pod = nri.asking("1", "future")
    made = nri.container(pod)
    for number in range(often):
        event = pb.StateChangeEvent(pod=pod, container=made).SerializeToString() + b"\x08" + bytes((90 + number % 30,))
        await runtime.ask("StateChange", event + more)
        create = pb.CreateContainerRequest(
            pod=pb.PodSandbox.FromString(pod.SerializeToString() + more),
            container=pb.Container.FromString(made.SerializeToString() + more),
        )
        await runtime.call("CreateContainer", create.SerializeToString() + more)
        await runtime.event(Event.REMOVE_CONTAINER, pod, made)
    runtime.close()
    return "each answered as if they were not there"


async def disorder(victim: Victim, often: int, dice: random.Random) -> str:
    """Creations before Configure and Synchronize, both twice, Shutdown: refused alone, or answered."""
    for number in range(often):
        runtime = await victim.listener.accept(CONNECTS_S)
        request, _ = await runtime.registration()
        early = await _try(runtime, "CreateContainer", number)
        await runtime.answer(request)
        await runtime.configure()
        await _try(runtime, "Shutdown", number)
        await runtime.synchronize()
        late = [await _try(runtime, method, number) for method in ("Configure", "Synchronize", "Synchronize")]
        if early or any(late):
            raise HarnessError("what came out of order was answered as if it had not")
        await runtime.ask("StateChange")
        runtime.close()
    return "each refused as out of order, on a connection that stayed"


async def _try(runtime: ScriptedRuntime, method: str, number: int) -> bool:
    pod = nri.asking("1", f"disorder-{number}")
    payload = {"CreateContainer": nri.create(pod, nri.container(pod)), "Configure": nri.configure(nri.NRI_0_8)}
    return (await runtime.call(method, payload.get(method, b""))).status.ok


async def endless(victim: Victim, often: int, dice: random.Random) -> str:
    """Synchronize in parts that never end: the connection is, after its time."""
    runtime = await victim.listener.accept(CONNECTS_S)
    await runtime.register()
    pod = nri.pod("listed")
    part = pb.SynchronizeRequest(pods=[pod], containers=[nri.container(pod)], more=True).SerializeToString()
    parts, until = 0, time.monotonic() + CONNECTS_S
    with suppress(HarnessError, OSError):
        while time.monotonic() < until:
            await runtime.ask("Synchronize", part)
            parts += 1
    runtime.close()
    return f"ended after {parts:,} parts"


async def hung_up(victim: Victim, often: int, dice: random.Random) -> str:
    """Closed as soon as it is made: it must come back, and not in a tight loop."""
    began = time.monotonic()
    for _ in range(often):
        (await victim.listener.accept(CONNECTS_S)).close()
    took_s = time.monotonic() - began
    if took_s < often * 0.01:
        raise HarnessError(f"{often} connections within {took_s:.2f} s")
    return f"it came back {often / took_s:.0f} times a second"


ENDED: Final = "connection ended, reconnecting"
ATTACKS: Final[Mapping[str, Attack]] = {
    "truncated": Attack("a request cut off at every byte", truncated, 672, 12, "cuts", ENDED),
    "garbage": Attack("random bytes", garbage, 300, 5, "connections", ENDED),
    "at-once": Attack("as many requests at once", at_once, 1000, 1000, "requests"),
    "unknown": Attack("unknown methods, frame types, mux ids", unknown, 1000, 8, "requests"),
    "used-ids": Attack("stream ids that were used, or are even", used_ids, 1000, 8, "requests", "request rejected"),
    "future": Attack("fields and enum values of the future", future, 500, 3, "requests"),
    "disorder": Attack("requests out of order", disorder, 100, 2, "sessions", "request failed"),
    "hung-up": Attack("connections closed when they are made", hung_up, 200, 5, "connections", ENDED),
    "endless": Attack("Synchronize in parts without end", endless, 1, 0, "sessions", ENDED),
}


def found(options: Options) -> Iterator[Found]:
    """A row for each attack on the daemon, then on the guard."""
    yield from attacked([options.case] if options.case else ATTACKS, options)


def attacked(names: Iterable[str], options: Options) -> Iterator[Row]:
    """Rows of some attacks, on one daemon and one guard."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nri-gpu-hostile-")))
        launch = Launch(folder / "daemon", folder / "nri.sock", driver_root=make_driver_root(folder / "driver"))
        daemon = NriGpu(launch)
        beside = Launch(launch.base, folder / "guard.sock")
        for process, grants in ((daemon, True), (NriGuard(beside), False)):
            stack.enter_context(process)
            for name in names:
                if often := ATTACKS[name].quick if options.quick else ATTACKS[name].often:
                    yield asyncio.run(_row(process, name, often, options.seed, grants=grants))


async def _row(process: NriGpu, name: str, often: int, seed: int, *, grants: bool) -> Row:
    attack = ATTACKS[name]
    async with Listener(process.launch.socket, backlog=64) as listener:
        victim = Victim(process, listener, grants=grants)
        outcome, passed, before, said = "", True, (0.0, 0), len(process.log())
        try:
            await victim.recover()  # staged, and warm
            victim.slowest_s = 0.0
            victim.measure()
            before = (victim.rss_mib, victim.descriptors)
            outcome = await attack.do(victim, often, random.Random(seed))
            await victim.recover()
            victim.check(*before)
            passed = attack.said in process.log()[said:]
            outcome += "" if passed else f"; the log has no line {attack.said!r}"
        except (HarnessError, OSError) as error:
            outcome, passed = f"{outcome} {error}".strip(), False
    numbers = {
        "back_s": round(victim.slowest_s, 3),
        "rss_before_mib": round(before[0], 1),
        "rss_mib": round(victim.rss_mib, 1),
        "descriptors_before": before[1],
        "descriptors": victim.descriptors,
    }
    outcome = f"{outcome}; then served within {victim.slowest_s:.1f} s, {victim.rss_mib - before[0]:+.0f} MiB"
    who = "daemon" if grants else "guard"
    command = f"python -m tests.reliability --only hostile --case {name}"
    return Row(f"{who}: {attack.what}", often, attack.unit, outcome, command, passed, numbers)
