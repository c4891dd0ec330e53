from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.allocation.ledger import GrantPhase
from nri_gpu.daemon import journal as journal_module
from nri_gpu.daemon.journal import Journal, StateRecorder
from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.node import Inventory
from nri_gpu.nri.events import Event
from nri_gpu.nri.session import Listed
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.plugin.service import REQUEST_TIMEOUT_S
from nri_gpu.policy.model import Policy
from nri_gpu.system.state import NodeState
from nri_gpu.ttrpc.events import Status
from tests.support import builders as make
from tests.support.log import Log
from tests.support.plugin import KEY, Clock, node

GRACE_S = Policy.default().ledger.created_grace_s


class Daemon:
    """One life of a daemon on a state folder; the next one is another of these, on the same folder and clock."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.recorder = StateRecorder(Journal(folder / "journal", KEY), None, lambda action: action(), GRACE_S)
        state = NodeState(Inventory(taken_at=0))
        state.node = node()
        self.plugin = Plugin(state, PluginDependencies(clock, lambda _: None, recorder=self.recorder), KEY)

    def create(self, container: Container) -> bool:
        return not isinstance(self.plugin.create_container(make.create_payload(container)), Status)

    def event(self, event: Event, container: Container) -> None:
        self.plugin.lifecycle(make.event_payload(event, container))

    def phases(self) -> dict[str, GrantPhase]:
        return {entry.grant.pod_name: entry.phase for entry in self.plugin.ledger.entries.values()}


@pytest.fixture
def clock() -> Clock:
    return Clock()


ONE = make.container("device=0", of="one")
OTHER = make.container("device=0", of="other")


def test_what_the_runtime_does_not_list_yet_is_not_granted_again(tmp_path: Path, clock: Clock) -> None:
    assert Daemon(tmp_path, clock).create(ONE)
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized(())
    assert after.phases() == {"one": GrantPhase.CREATED}
    assert not after.create(OTHER)


def test_nor_for_longer_than_the_grace(tmp_path: Path, clock: Clock) -> None:
    assert Daemon(tmp_path, clock).create(ONE)
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized(())
    clock.now += GRACE_S + 1
    assert after.create(OTHER)


def test_nor_once_the_runtime_has_had_its_time_and_does_not_list_it(tmp_path: Path, clock: Clock) -> None:
    """A daemon that was stopped, or whose answer nobody read, keeps a GPU from nobody for the whole grace."""
    daemon = Daemon(tmp_path, clock)
    assert daemon.create(ONE)
    clock.now += 10
    daemon.plugin.synchronized(())
    clock.now += REQUEST_TIMEOUT_S - 0.1
    assert not daemon.create(OTHER)
    clock.now += 0.2
    assert daemon.create(OTHER)
    late = daemon.plugin.lifecycle(make.event_payload(Event.START_CONTAINER, ONE))
    assert isinstance(late, Status)  # without a mark it was refused before, too


def test_nor_does_one_start_that_the_runtime_was_too_slow_with(tmp_path: Path, clock: Clock) -> None:
    daemon = Daemon(tmp_path, clock)
    assert daemon.create(ONE)
    (entry,) = daemon.plugin.ledger.entries.values()
    daemon.plugin.synchronized(())
    clock.now += REQUEST_TIMEOUT_S + 1
    assert daemon.create(OTHER)
    marked = make.marked(ONE, entry.grant, KEY)
    late = daemon.plugin.lifecycle(make.event_payload(Event.START_CONTAINER, marked))
    assert isinstance(late, Status)
    assert "[gpu-busy]" in late.message


def test_an_answer_of_which_nothing_left_is_no_grant(tmp_path: Path, clock: Clock) -> None:
    daemon = Daemon(tmp_path, clock)
    payload = make.create_payload(ONE)
    daemon.plugin.create_container(payload)
    daemon.plugin.unanswered(payload)
    daemon.plugin.unanswered(b"\xff")
    assert daemon.phases() == {}
    assert Daemon(tmp_path, clock).recorder.remembered(0.0) == []
    assert daemon.create(OTHER)


def test_a_daemon_that_comes_after_the_grace_knows_nothing_of_it(tmp_path: Path, clock: Clock) -> None:
    assert Daemon(tmp_path, clock).create(ONE)
    clock.now += GRACE_S + 1
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized(())
    assert after.phases() == {}


@pytest.mark.parametrize("event", [Event.START_CONTAINER, Event.REMOVE_CONTAINER, Event.STOP_CONTAINER])
def test_what_is_settled_is_the_runtimes_to_tell(tmp_path: Path, clock: Clock, event: Event) -> None:
    before = Daemon(tmp_path, clock)
    assert before.create(ONE)
    before.event(event, ONE)
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized(())
    assert after.phases() == {}


def test_what_the_runtime_lists_is_there_once(tmp_path: Path, clock: Clock) -> None:
    before = Daemon(tmp_path, clock)
    assert before.create(ONE)
    (entry,) = before.plugin.ledger.entries.values()
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized((Listed(make.marked(ONE, entry.grant, KEY), created=False),))
    assert after.phases() == {"one": GrantPhase.RUNNING}


def test_a_connection_that_is_made_anew_forgets_nothing(tmp_path: Path, clock: Clock) -> None:
    daemon = Daemon(tmp_path, clock)
    assert daemon.create(ONE)
    daemon.plugin.synchronized(())
    assert not daemon.create(OTHER)


def test_a_grant_of_nothing_is_not_worth_a_line(tmp_path: Path, clock: Clock) -> None:
    assert Daemon(tmp_path, clock).create(make.container("none"))
    assert not (tmp_path / "journal").exists()


def test_a_folder_that_cannot_be_written_stops_no_grant(tmp_path: Path, clock: Clock, log: Log) -> None:
    daemon = Daemon(tmp_path / "gone", clock)
    assert daemon.create(ONE)
    assert daemon.create(make.container("device=1", of="third"))
    assert len(log.said("journal not written; the grants on the containers hold")) == 1


def test_it_does_not_grow_for_ever(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 4096)
    daemon = Daemon(tmp_path, clock)
    for number in range(100):
        container = make.container("device=0", of=f"pod-{number}")
        assert daemon.create(container)
        daemon.event(Event.START_CONTAINER, container)
        daemon.event(Event.REMOVE_CONTAINER, container)
        clock.now += 1
    assert (tmp_path / "journal").stat().st_size < 3 * 4096


def test_nor_where_nothing_that_was_granted_is_ever_made(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container whose creation fails behind our reply sends no event, and a kubelet makes the next."""
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 4096)
    daemon = Daemon(tmp_path, clock)
    for number in range(100):
        assert daemon.create(make.container("device=0", of="p", id=ContainerId(f"attempt-{number}")))
        clock.now += GRACE_S / 4
    assert (tmp_path / "journal").stat().st_size < 3 * 4096
    assert len(daemon.recorder._unsettled) < 20


def test_a_time_to_come_does_not_put_off_the_end_of_the_grace(tmp_path: Path, clock: Clock) -> None:
    assert Daemon(tmp_path, clock).create(ONE)
    file = tmp_path / "journal"
    file.write_text(file.read_text().replace(f'"at": {clock.now}', '"at": 9e9'))
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized(())
    assert after.phases() == {"one": GrantPhase.CREATED}
    clock.now += GRACE_S + 1
    assert after.create(OTHER)


def test_a_grant_whose_answer_was_lost_does_not_start_what_never_got_it(tmp_path: Path, clock: Clock) -> None:
    """The daemon died between its journal and its answer, and the runtime listed the container too late."""
    assert Daemon(tmp_path, clock).create(ONE)
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized(())
    refused = after.plugin.lifecycle(make.event_payload(Event.START_CONTAINER, ONE))
    assert isinstance(refused, Status)
    assert "[not-granted]" in refused.message
    assert after.phases() == {}
    assert after.create(OTHER)


def test_a_grant_that_was_not_listed_yet_starts(tmp_path: Path, clock: Clock) -> None:
    before = Daemon(tmp_path, clock)
    assert before.create(ONE)
    (entry,) = before.plugin.ledger.entries.values()
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized(())
    after.event(Event.START_CONTAINER, make.marked(ONE, entry.grant, KEY))
    assert after.phases() == {"one": GrantPhase.RUNNING}


def test_the_end_of_a_pod_settles_what_it_had(tmp_path: Path, clock: Clock) -> None:
    before = Daemon(tmp_path, clock)
    assert before.create(ONE)
    before.event(Event.STOP_POD_SANDBOX, ONE)
    after = Daemon(tmp_path, clock)
    after.plugin.synchronized(())
    assert after.phases() == {}
