"""Law: at a GPU's MPS daemon shares never exceed its memory, no more sit than may, and one user runs; whatever happens.

Two GPUs of 40 GiB, containers that come, start as one of two users, lapse, end; the plugin's restart, after which a
container's seat is read from its environment.
"""

from __future__ import annotations

from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.decision.mps_seats import start_fault
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Inject, Refuse
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.mps import MIB, Seat
from nri_gpu.ledger.events import Started, Synchronized, Ticked
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.policy.mps_settings import MpsSettings
from tests.property import strategies
from tests.support import builders as make
from tests.support.ledgers import after, decided

NODE: Final = make.node(make.gpus(2))
MOST: Final = 3
POLICY: Final = Policy(mps=MpsSettings(enabled=True, containers_per_gpu=MOST))
GRACE_S: Final = 60.0
SHARES: Final = ("", ";sharing=memory:10Gi", ";sharing=memory:30Gi,threads:50", ";sharing=threads:1")
claims = st.one_of(
    st.builds("{};mode=mps{}".format, st.sampled_from(["1", "device=0"]), st.sampled_from(SHARES)),
    st.sampled_from(["1;mode=shared", "device=0", "device=1;mode=mps"]),
)
users = st.sampled_from([1000, 1001])
picks = st.integers(0, 99)


class Seats(RuleBasedStateMachine):
    """The ledger as the plugin keeps it; env: what each container found in its environment."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0
        self.number = 0
        self.env: dict[ContainerId, Container] = {}
        self.users: dict[ContainerId, int] = {}

    @rule(claim=claims, wait_s=st.sampled_from([1.0, 1.0, GRACE_S + 1]), told=st.one_of(st.none(), users))
    def create(self, claim: str, wait_s: float, told: int | None) -> None:
        self.now += wait_s
        self.number += 1
        container = make.container(claim, of=f"p{self.number}", uid=told)
        self.ledger = after(self.ledger, Ticked(self.now))
        decision = decide(container, NODE, self.ledger, POLICY)
        assert isinstance(decision, Inject | Refuse)
        self.ledger = decided(self.ledger, decision, self.now)
        if isinstance(decision, Inject):
            seat = decision.grant.seat
            self.env[container.id] = replace(container, env=decision.edits.env, mps_folder=seat.folder if seat else "")
            self.users[container.id] = told or 1000 + self.number % 2

    def some(self, pick: int) -> Entry | None:
        entries = list(self.ledger.entries.values())
        return entries[pick % len(entries)] if entries else None

    @rule(pick=picks)
    def start(self, pick: int) -> None:
        """As plugin/handlers.py does it."""
        entry = self.some(pick)
        if entry is None or entry.phase is GrantPhase.RUNNING:
            return
        id_ = entry.grant.container_id
        if not self.ledger.may_start(id_):
            return
        uid, seat = self.users[id_], entry.grant.seat and replace(entry.grant.seat, uid=self.users[id_])
        if seat is not None and start_fault(replace(entry.grant, seat=seat), uid, self.ledger, NODE.inventory):
            return
        self.ledger = after(self.ledger, Started(self.now, id_, seat))

    @rule(pick=picks)
    def end(self, pick: int) -> None:
        if entry := self.some(pick):
            self.ledger = self.ledger.without_containers({entry.grant.container_id})

    @rule()
    def restart(self) -> None:
        entries = [
            Entry(
                replace(entry.grant, seat=entry.grant.seat and self.seen(entry)),
                GrantPhase.RUNNING if entry.phase is GrantPhase.RUNNING else GrantPhase.CREATED,
                self.now,
            )
            for id_, entry in self.ledger.entries.items()
        ]
        ran = {id_: entry for id_, entry in self.ledger.entries.items() if entry.phase is GrantPhase.RUNNING}
        self.ledger = after(Ledger(), Synchronized(self.now, entries=tuple(entries)))
        assert all(self.ledger.entries[id_].grant == entry.grant for id_, entry in ran.items())

    def seen(self, entry: Entry) -> Seat:
        container = self.env[entry.grant.container_id]
        known = self.users[container.id] if entry.phase is GrantPhase.RUNNING else None
        return Seat.read(container.env, known, container.mps_folder)

    def running(self, index: int) -> list[Entry]:
        entries = self.ledger.entries.values()
        return [each for each in entries if each.phase is GrantPhase.RUNNING and make.uuid(index) in each.grant.uuids]

    @invariant()
    def modes_never_mix(self) -> None:
        assert not strategies.capacity_faults(self.ledger)
        assert all(
            (each.grant.seat is not None) == (each.grant.mode is Mode.MPS) for each in self.ledger.entries.values()
        )

    @invariant()
    def shares_fit_and_one_user_runs(self) -> None:
        for gpu in NODE.gpus:
            seats = [each.grant.seat for each in self.running(gpu.index) if each.grant.seat]
            assert sum(seat.memory_mib for seat in seats) <= (gpu.memory_bytes or 0) // MIB
            assert len({seat.uid for seat in seats}) <= 1
            assert None not in {seat.uid for seat in seats}


TestSeats = Seats.TestCase
TestSeats.settings = settings(max_examples=40, stateful_step_count=25)


@given(st.integers(0, 10**9 - 1), st.integers(1, 100), st.one_of(st.none(), users))
def test_a_seat_comes_back_from_its_variables(memory_mib: int, threads: int, uid: int | None) -> None:
    seat = Seat(memory_mib, threads, uid)
    assert Seat.read(seat.variables(), uid, "") == seat


@given(st.lists(st.sampled_from(SHARES), max_size=8))
def test_no_more_sit_than_may(shares: list[str]) -> None:
    """Without a restart, created ones count as those that run."""
    ledger = Ledger()
    for number, share in enumerate(shares):
        container = make.container(f"1;mode=mps{share}", of=f"p{number}")
        ledger = decided(ledger, decide(container, NODE, ledger, POLICY), 0.0)
    for gpu in NODE.gpus:
        use = ledger.usage().get(gpu.uuid)
        grants = list(use.grants.values()) if use else []
        assert len(grants) <= MOST
        assert sum(grant.seat.memory_mib for grant in grants if grant.seat) <= (gpu.memory_bytes or 0) // MIB
