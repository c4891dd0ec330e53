"""Law: a process lives as long as one of its threads does, whichever; only then is it over for us."""

from __future__ import annotations

import os
import select

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nri_gpu.domain.container import ContainerId
from nri_gpu.system.cgroups import ContainerCgroups
from nri_gpu.system.proc import parse_stat
from nri_gpu.system.process import process_of
from tests.support import threads

ENDED = "ZX"  # zombie, dead: proc_pid_stat(5), state


@given(name=st.text(max_size=15), first=st.sampled_from("RSDZTtXIP"), others=st.integers(0, 3))
def test_a_process_is_over_once_no_thread_is_left(name: str, first: str, others: int) -> None:
    fields = [first, "1", *"0" * 15, str(1 + others), "0", "1234", "0"]
    stat = parse_stat(f"41 ({name}) {' '.join(fields)}\n")
    assert stat.lives is (first not in ENDED or others > 0)
    assert (stat.state, stat.parent, stat.started) == (first, 1, 1234)


class Program(RuleBasedStateMachine):
    """A real program whose threads start and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.child = threads.started()
        self.pid = self.child.pid
        self.fd = os.pidfd_open(self.pid)
        self.first = ContainerCgroups((), same_pids=True).first_process(self.pid, ContainerId("any"))
        self.threads = {self.pid}

    @precondition(lambda self: self.threads)
    @rule()
    def start(self) -> None:
        threads.start_thread(self.pid)
        self.threads |= threads.living(self.pid)

    @precondition(lambda self: self.threads)
    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        self.end_thread(sorted(self.threads)[number % len(self.threads)])

    @precondition(lambda self: self.pid in self.threads)
    @rule()
    def end_the_first(self) -> None:
        self.end_thread(self.pid)

    def end_thread(self, thread: int) -> None:
        threads.end_thread(self.pid, thread)
        self.threads.remove(thread)

    @invariant()
    def it_lives_as_long_as_a_thread(self) -> None:
        assert self.first
        lives = bool(self.threads)
        found = process_of(self.pid)
        assert (found is not None) is lives
        assert found is None or found.started == self.first.started
        assert ContainerCgroups((), same_pids=True).lives(self.first) is lives
        readable, *_ = select.select([self.fd], [], [], 0)  # for which `UntoldExits` and `ProcessWatch` wait
        assert bool(readable) is not lives

    @precondition(lambda self: not self.threads)
    @rule()
    def run_another(self) -> None:
        self.teardown()
        self.begin()

    def teardown(self) -> None:
        os.close(self.fd)
        self.child.kill()
        self.child.wait()


TestProgram = Program.TestCase
TestProgram.settings = settings(max_examples=15, stateful_step_count=12)
