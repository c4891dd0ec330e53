"""The journal by itself, and what the next daemon remembers by it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from nri_gpu.domain.container import Container, ContainerId
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.grant_text import sign_grant
from nri_gpu.ledger.ledger import GrantPhase
from nri_gpu.ledger.recording import Remembered
from nri_gpu.nri.session import Listed
from nri_gpu.nri.subscription import Event
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.plugin.nri_service import REQUEST_TIMEOUT_S
from nri_gpu.policy.model import Policy
from nri_gpu.records.journal import Journal, RevokedReader, revoked_in
from nri_gpu.records.recorder import StateRecorder
from nri_gpu.system.state import NodeState
from nri_gpu.ttrpc.frames import SEND_MAX, Status
from tests.support import builders as make
from tests.support.log import Log
from tests.support.plugin import KEY, Bench, Clock, node

GRACE_S = Policy.default().ledger.created_grace_s
ONE = make.grant(0, to=make.container(name="one"))
TWO = make.grant(1, to=make.container(name="two"))
SHARED = make.grant(2, 3, mode=Mode.SHARED, to=make.container(name="shared"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    made = Journal(path, KEY)
    yield made
    made.close()


def grant(journal: Journal, granted: Grant, at: float) -> None:
    journal.granted(granted, sign_grant(granted, KEY), at)


def test_what_was_granted_is_remembered_in_its_order(path: Path, journal: Journal) -> None:
    grant(journal, ONE, 10.0)
    grant(journal, SHARED, 11.5)
    both = (Remembered(ONE, 10.0), Remembered(SHARED, 11.5))
    assert journal.remembered(since=0) == Journal(path, KEY).remembered(since=0) == both
    assert [(each.grant.namespace, each.grant.pod_name) for each in journal.remembered(0)] == [("ml", "train")] * 2
    assert journal.remembered(since=11.5) == both[1:]
    assert path.stat().st_mode & 0o777 == 0o600
    assert Journal(path.with_name("none"), KEY).remembered(since=0) == ()


@pytest.mark.parametrize("kept", range(1, 200, 7))
def test_a_line_cut_short_loses_itself_and_no_other(path: Path, journal: Journal, kept: int) -> None:
    grant(journal, ONE, 1.0)
    before = path.stat().st_size
    grant(journal, TWO, 2.0)
    os.truncate(path, before + kept)
    grant(journal, SHARED, 3.0)
    assert [each.grant for each in journal.remembered(since=0)] == [ONE, SHARED]


EDITED = {
    "not json": b"nonsense",
    "not text": b"\xff\xfe\x00",
    "a list": b"[1, 2]",
    "a number": b"7",
    "no signature": b'{"at": 1, "container_id": "x"}',
    "no signature but null": b'{"at": 1, "container_id": null, "mark": null}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("line", EDITED.values(), ids=EDITED)
def test_what_was_edited_by_hand_is_passed_over(path: Path, journal: Journal, line: bytes) -> None:
    grant(journal, ONE, 1.0)
    with path.open("ab") as file:
        file.write(b"\n" + line)
    grant(journal, TWO, 2.0)
    assert [each.grant for each in journal.remembered(since=0)] == [ONE, TWO]


TIMES = ['"soon"', "null", "true", "[]", "-1", "NaN", "Infinity", "9" * 400, "9" * 5000]
FORGED = {
    **{f"at {time[:9]}": ("1.25", time) for time in TIMES},
    "another GPU than was signed": (make.uuid(0), make.uuid(1)),
    "signed with another key": (sign_grant(ONE, KEY), sign_grant(ONE, bytes(32))),
}


@pytest.mark.parametrize(("said", "forged"), FORGED.values(), ids=FORGED)
def test_a_grant_that_was_edited_is_passed_over(path: Path, journal: Journal, said: str, forged: str) -> None:
    grant(journal, ONE, 1.25)
    assert said in path.read_text()
    path.write_text(path.read_text().replace(said, forged))
    assert journal.remembered(since=0) == ()


def test_compacted_it_tells_the_same_and_no_more(path: Path, journal: Journal) -> None:
    for at in range(50):
        grant(journal, ONE, float(at))
        journal.settled(ONE.container_id)
    grant(journal, TWO, 60.0)
    grant(journal, SHARED, 70.0)
    large = path.stat().st_size
    journal.compact(since=65.0)
    assert path.stat().st_size < large / 10
    grant(journal, ONE, 80.0)
    assert journal.remembered(since=0) == (Remembered(SHARED, 70.0), Remembered(ONE, 80.0))


def test_a_journal_of_the_previous_version_is_read(path: Path, journal: Journal) -> None:
    fields = {"container": "one", "pod_id": ONE.pod_id, "pod": "train", "namespace": "ml", "pod_uid": ONE.pod_uid}
    old = {"at": 7, "container_id": ONE.container_id, **fields, "mark": sign_grant(ONE, KEY), "later": None}
    path.write_text(f"\n{json.dumps(old)}")
    assert journal.remembered(since=0) == (Remembered(ONE, 7.0),)


# --- one daemon after another -----------------------------------------------------------------------------------------


class Daemon:
    """One life of a daemon on a state folder; the next one is another of these, on the same folder and clock."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        journal = Journal(folder / "journal", KEY, compact_bytes=4096)
        self.recorder = StateRecorder(journal, None, lambda action: action(), GRACE_S)
        state = NodeState(Inventory(taken_at=0), later=lambda _: None)
        state.node = node()
        self.killed: dict[str, str] = {}
        needs = PluginDependencies(clock, lambda _: None, recorder=self.recorder, kill=self.killed.update)
        self.plugin = Plugin(state, needs, KEY)

    def create(self, container: Container) -> bool:
        return not isinstance(self.plugin.create_container(make.create_payload(container)), Status)

    def granted(self, container: Container) -> Container:
        """The same container as the runtime shows it afterwards."""
        assert self.create(container)
        entry = self.plugin.ledger.entries[container.id]
        return make.marked(container, entry.grant, KEY)

    def event(self, event: Event, container: Container) -> str:
        """Why it is refused; empty where it is not."""
        reply = self.plugin.lifecycle(make.event_payload(event, container))
        return reply.message if isinstance(reply, Status) else ""

    def phases(self) -> dict[str, GrantPhase]:
        return {entry.grant.pod_name: entry.phase for entry in self.plugin.ledger.entries.values()}


class Lives:
    """Daemons on one node, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, Clock()
        self.now = Daemon(folder, self.clock)

    def restart(self, listed: Sequence[Listed] = ()) -> Daemon:
        """The next one, to which the runtime lists these."""
        self.now = Daemon(self.folder, self.clock)
        self.now.plugin.synchronized(tuple(listed))
        return self.now


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path)


GPU_0 = make.container("device=0", of="one")
OTHER = make.container("device=0", of="other")
WAITING = {"one": GrantPhase.CREATED}
RUNNING = {"one": GrantPhase.RUNNING}


def test_what_the_runtime_does_not_list_yet_is_not_granted_again(lives: Lives) -> None:
    assert lives.now.create(GPU_0)
    after = lives.restart()
    assert after.phases() == WAITING
    assert not after.create(OTHER)
    after.plugin.synchronized(())  # a connection that is made anew
    assert not after.create(OTHER)
    lives.clock.now += GRACE_S + 1
    assert lives.restart().phases() == {}
    assert after.create(OTHER)


def test_nor_once_the_runtime_has_had_its_time_and_does_not_list_it(lives: Lives) -> None:
    """A daemon that was stopped, or whose answer nobody read, keeps a GPU from nobody for the whole grace."""
    made = lives.now.granted(GPU_0)
    lives.clock.now += 10
    lives.now.plugin.synchronized(())
    lives.clock.now += REQUEST_TIMEOUT_S - 0.1
    assert not lives.now.create(OTHER)
    lives.clock.now += 0.2
    assert lives.now.create(OTHER)
    assert lives.now.event(Event.START_CONTAINER, GPU_0)  # without a signed grant it was refused before, too
    assert "[gpu-busy]" in lives.now.event(Event.START_CONTAINER, made)


def test_an_answer_of_which_nothing_left_is_no_grant(lives: Lives) -> None:
    payload = make.create_payload(GPU_0)
    lives.now.plugin.create_container(payload)
    lives.now.plugin.unanswered(payload)
    lives.now.plugin.unanswered(b"\xff")
    assert lives.now.phases() == {"one": GrantPhase.LAPSED}
    assert lives.restart().phases() == {}
    assert lives.now.create(OTHER)


@pytest.mark.parametrize(
    "event", [Event.START_CONTAINER, Event.REMOVE_CONTAINER, Event.STOP_CONTAINER, Event.STOP_POD_SANDBOX]
)
def test_what_is_settled_is_the_runtimes_to_tell(lives: Lives, event: Event) -> None:
    assert lives.now.create(GPU_0)
    lives.now.event(event, GPU_0)
    assert lives.restart().phases() == {}


def test_a_grant_of_nothing_is_not_worth_a_line(lives: Lives) -> None:
    assert lives.now.create(make.container("none"))
    assert not (lives.folder / "journal").exists()


def test_a_folder_that_cannot_be_written_stops_no_grant(tmp_path: Path, log: Log) -> None:
    daemon = Daemon(tmp_path / "gone", Clock())
    assert daemon.create(GPU_0)
    assert daemon.create(make.container("device=1", of="third"))
    assert len(log.said("journal not written; signed grants on containers stay valid")) == 1


def test_a_time_to_come_does_not_put_off_the_end_of_the_grace(lives: Lives) -> None:
    assert lives.now.create(GPU_0)
    file = lives.folder / "journal"
    file.write_text(file.read_text().replace(f'"at":{lives.clock.now}', '"at":9e9'))
    after = lives.restart()
    assert after.phases() == WAITING
    lives.clock.now += GRACE_S + 1
    assert after.create(OTHER)


def test_a_grant_that_was_not_listed_yet_starts(lives: Lives) -> None:
    made = lives.now.granted(GPU_0)
    after = lives.restart()
    assert after.event(Event.START_CONTAINER, made) == ""
    assert after.phases() == RUNNING


@pytest.mark.parametrize("event", [Event.START_CONTAINER, None])
def test_the_file_stays_small(lives: Lives, event: Event | None) -> None:
    """Also where creation fails behind our reply, so that no event settles the grant, and a kubelet tries again."""
    for number in range(100):
        container = make.container("device=0", of="p", id=ContainerId(f"attempt-{number}"))
        assert lives.now.create(container)
        if event:
            lives.now.event(event, container)
            lives.now.event(Event.REMOVE_CONTAINER, container)
        lives.clock.now += GRACE_S / 4
    assert (lives.folder / "journal").stat().st_size < 3 * 4096
    assert len([*lives.now.recorder.remembered(0.0)]) < 20


# --- containers whose GPUs another one was granted before they started ------------------------------------------------


def test_who_must_not_start_any_more_stays_known_until_it_is_removed(path: Path, journal: Journal) -> None:
    pods = {ONE.container_id: ONE.pod_id, SHARED.container_id: SHARED.pod_id}
    journal.granted(TWO, sign_grant(TWO, KEY), 1.0, pods)
    journal.settled(TWO.container_id)
    journal.compact(since=50.0)
    assert revoked_in(path) == Journal(path, KEY).revoked() == pods
    journal.removed([SHARED.container_id])
    path.write_bytes(path.read_bytes() + b'\n{"revoked":{"cut')
    assert revoked_in(path) == {ONE.container_id: ONE.pod_id}
    assert revoked_in(path.with_name("none")) == {}
    with pytest.raises(OSError, match="directory"):
        revoked_in(path.parent)


def test_the_reader_beside_the_daemon_reads_what_was_appended_and_nothing_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the file, it knows what the whole file says."""
    reader, writer, read_bytes = RevokedReader(path), Journal(path, KEY), [0]
    pread = os.pread

    def counted(fd: int, size_bytes: int, offset: int) -> bytes:
        read_bytes[0] += size_bytes
        return pread(fd, size_bytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert reader.revoked() == {}
    many = {ContainerId(f"{number:064}"): ONE.pod_id for number in range(4096)}
    writer.granted(TWO, sign_grant(TWO, KEY), 1.0, many)
    writer.settled(TWO.container_id)
    assert reader.revoked() == revoked_in(path) == many  # none is dropped for their number
    read_bytes[0] = 0
    assert reader.revoked() == many
    assert read_bytes == [0]
    writer.granted(TWO, sign_grant(TWO, KEY), 2.0, {ONE.container_id: ONE.pod_id})
    assert ONE.container_id in reader.revoked()
    assert read_bytes[0] < 2048
    writer.removed([ONE.container_id])
    assert reader.revoked() == many
    writer.compact(since=0.0)
    assert reader.revoked() == revoked_in(path) == many
    writer.removed(many)
    assert reader.revoked() == {}
    path.write_bytes(b"")
    assert reader.revoked() == {}
    path.unlink()
    assert reader.revoked() == {}
    path.mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            reader.revoked()
    path.rmdir()
    Journal(path, KEY).granted(TWO, sign_grant(TWO, KEY), 3.0, {ONE.container_id: ONE.pod_id})
    assert reader.revoked() == {ONE.container_id: ONE.pod_id}


def test_a_line_that_is_read_while_it_is_written_is_read_once_more(path: Path) -> None:
    reader = RevokedReader(path)
    Journal(path, KEY).granted(TWO, sign_grant(TWO, KEY), 1.0, {ONE.container_id: ONE.pod_id})
    whole = path.read_bytes()
    path.write_bytes(b"")
    with path.open("ab", buffering=0) as file:
        for cut in range(0, len(whole), 7):
            file.write(whole[cut : cut + 7])
            assert reader.revoked() == revoked_in(path)
    assert reader.revoked() == {ONE.container_id: ONE.pod_id}


def test_what_must_be_kept_does_not_make_the_file_full_again(path: Path) -> None:
    """Else each start of a container would write all of it again."""
    journal = Journal(path, KEY, compact_bytes=4096)
    many = {ContainerId(f"{number:064}"): ONE.pod_id for number in range(100)}
    journal.granted(TWO, sign_grant(TWO, KEY), 1.0, many)
    assert journal.full
    journal.compact(since=9.0)
    journal.granted(ONE, sign_grant(ONE, KEY), 10.0)
    assert path.stat().st_size > 4096
    assert not journal.full
    assert journal.revoked() == many


def test_many_that_wait_to_be_removed_are_told_once_and_none_is_dropped(log: Log) -> None:
    bench = Bench()
    granted = bench.plugin._granted
    for number in range(4100):
        granted.revoke({ContainerId(f"c-{number}"): ONE.pod_id})
        if number == 4094:
            bench.settle()
            assert not log.lines
    bench.settle()
    assert len(granted.revoked) == 4100
    assert log.one("many containers wait to be removed").level == "WARNING"


def test_a_list_without_a_revoked_container_drops_it_nowhere(lives: Lives) -> None:
    """Nowhere does containerd 1.7.24 list one that is being created. The end of its pod drops it."""
    made = lives.now.granted(GPU_0)
    lapse(lives, made)
    other, reader = lives.now.granted(OTHER), RevokedReader(lives.folder / "journal")
    after = lives.restart([Listed(other, created=False)])
    assert reader.revoked() == {made.id: made.pod.id}
    assert "they have since been granted to another container" in after.event(Event.START_CONTAINER, made)
    after.event(Event.STOP_POD_SANDBOX, made)
    assert reader.revoked() == {}


def lapse(lives: Lives, made: Container) -> None:
    lives.clock.now += GRACE_S + 1


def stop(lives: Lives, made: Container) -> None:
    lives.now.event(Event.STOP_CONTAINER, made)


def make_again(lives: Lives, made: Container) -> None:
    again = make.container("device=0", of="one", id=ContainerId("again"))
    assert lives.now.create(again)
    lives.now.event(Event.REMOVE_CONTAINER, again)


def lose_the_answer(lives: Lives, made: Container) -> None:
    lives.now.plugin.unanswered(make.create_payload(GPU_0))


def test_who_is_refused_for_its_answer_takes_nothing_from_who_gave_way(lives: Lives) -> None:
    made = lives.now.granted(GPU_0)
    lapse(lives, made)
    too_large = make.container("device=0", of="other", env={"LD_LIBRARY_PATH": "/".ljust(SEND_MAX, "x")})
    written = (lives.folder / "journal").read_bytes()
    assert not lives.now.create(too_large)
    assert (lives.folder / "journal").read_bytes() == written
    assert lives.now.event(Event.START_CONTAINER, made) == ""
    assert lives.now.phases() == RUNNING


@pytest.mark.parametrize("hold_no_more", [lapse, stop, make_again, lose_the_answer])
def test_who_gave_way_never_starts_beside_who_got_its_gpus(
    lives: Lives, hold_no_more: Callable[[Lives, Container], None]
) -> None:
    """Nor after a restart that lists it, nor once that other one is gone; the guard reads the same."""
    made = lives.now.granted(GPU_0)
    hold_no_more(lives, made)
    other = lives.now.granted(OTHER)
    assert lives.now.event(Event.START_CONTAINER, other) == ""
    assert "they have since been granted to another container" in lives.now.event(Event.START_CONTAINER, made)
    assert revoked_in(lives.folder / "journal") == {made.id: made.pod.id}
    after = lives.restart([Listed(made, created=True), Listed(other, created=False)])
    assert after.phases() == {"one": GrantPhase.LAPSED, "other": GrantPhase.RUNNING}
    after.event(Event.REMOVE_CONTAINER, other)
    assert "they have since been granted to another container" in after.event(Event.START_CONTAINER, made)
    after.event(Event.REMOVE_CONTAINER, made)
    assert revoked_in(lives.folder / "journal") == {}


def test_who_gave_way_and_runs_beside_who_got_its_gpus_is_killed(lives: Lives, log: Log) -> None:
    """It was started while nobody was connected."""
    made = lives.now.granted(GPU_0)
    lapse(lives, made)
    other = lives.now.granted(OTHER)
    after = lives.restart([Listed(made, created=False), Listed(other, created=False)])
    assert after.killed == {made.id: "ml/one"}
    said = log.one("container runs on GPUs that another pod holds")
    assert (said.level, said.fields["pod_name"], said.fields["holder"]) == ("ERROR", "one", "ml/other")
    # The other one is gone: it has its GPU again.
    assert lives.restart([Listed(made, created=False)]).phases()["one"] is GrantPhase.RUNNING
    assert not lives.now.killed
    assert revoked_in(lives.folder / "journal") == {}
    assert not lives.now.create(OTHER)


@pytest.mark.parametrize("beside", ["its own pod", "one that was not started"])
def test_who_gave_way_lives_where_no_other_pod_runs_on_its_gpus(lives: Lives, beside: str) -> None:
    made = lives.now.granted(GPU_0)
    lapse(lives, made)
    other = lives.now.granted(OTHER)
    if beside == "its own pod":
        other = lives.restart([Listed(made, created=False)]).granted(make.container("device=0", of="one", name="side"))
        lives.now.recorder.granted(TWO, sign_grant(TWO, KEY), lives.clock.now, {made.id: made.pod.id})
    after = lives.restart([Listed(made, created=False), Listed(other, created=beside != "its own pod")])
    assert not after.killed
    assert after.phases()["one"] is GrantPhase.RUNNING
    assert "[gpu-busy]" in after.event(Event.START_CONTAINER, OTHER) or beside == "its own pod"


def test_where_a_refused_start_is_not_heeded_it_is_killed_as_it_starts(lives: Lives) -> None:
    made = lives.now.granted(GPU_0)
    lives.now.plugin.unanswered(make.create_payload(GPU_0))
    other = lives.now.granted(OTHER)
    lives.now.plugin.runtime = "cri-o"
    assert "[gpu-busy]" in lives.now.event(Event.START_CONTAINER, made)
    assert lives.now.killed == {made.id: "ml/one"}
    lives.now.event(Event.REMOVE_CONTAINER, other)
    assert lives.now.event(Event.START_CONTAINER, made) == ""  # nobody has its GPU any more
    assert lives.now.phases() == RUNNING


def test_those_that_may_share_a_gpu_take_it_from_nobody(lives: Lives) -> None:
    for number in range(8):
        lives.now.granted(make.container("device=0;mode=shared", of=f"pod-{number}"))
    for name in ("main", "side"):
        lives.now.granted(make.container("device=1", of="pod", name=name))
    lapse(lives, GPU_0)
    lives.now.granted(make.container("device=0;mode=shared", of="late"))
    assert revoked_in(lives.folder / "journal") == {}


def test_what_the_journal_cannot_keep_takes_no_gpu_from_a_container(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lives.now.granted(GPU_0)
    lapse(lives, made)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[: len(line) // 2]))
    reply = lives.now.plugin.create_container(make.create_payload(OTHER))
    assert isinstance(reply, Status)
    assert "make room there" in reply.message
    assert lives.now.create(make.container("device=1", of="other"))  # of others' grants the container has the proof
    assert lives.now.event(Event.START_CONTAINER, made) == ""
