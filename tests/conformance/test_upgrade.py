"""The version before this one beside today's on real containerds: one process of each, an upgrade, the way back."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Self

import pytest
from msgspec.structs import replace

from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.records.journal import JOURNAL
from nri_gpu.records.policy_file import LAST_GOOD
from tests.conformance.conftest import launch_on
from tests.conformance.test_guard import ASKS, LATER_S, WITHOUT, Site, policy
from tests.conformance.test_lost import Holder
from tests.support import packages
from tests.support.cgroup import Cgroup
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import ENVIRONMENT, READY_S, UUIDS, Launch, NriGpu
from tests.support.guard import NriGuard
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec
from tests.support.released import released
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd

IGNORING: Final = '[namespaces]\nallow = ["default"]\notherwise = "ignore"\n[ledger]\ncreated_grace_s = 5\n'
IGNORED: Final = "web"  # a namespace that may not ask by that policy
TODAY: Final = {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}
Environment = Mapping[str, str]


class OnV1(NriGpu):
    """The daemon of a host that has cgroup v1 alone: a hybrid one shows containers in v2's hierarchy, too."""

    def command(self) -> list[str]:
        without = 'umount -q /sys/fs/cgroup/unified; exec "$@"'
        return ["unshare", "--mount", "sh", "-c", without, "sh", *super().command()]


class Node:
    """A daemon and a guard on a containerd, each of one version or the other. stay: who must go on running."""

    def __init__(self, site: Site, launch: Launch, daemon: type[NriGpu] = NriGpu) -> None:
        self.site = site
        self.daemon = daemon(launch)
        self.guard = NriGuard(launch, launch.policy)
        self.stay: list[ContainerId] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.guard.__exit__()
        self.daemon.__exit__()

    @property
    def journal(self) -> str:
        return (self.daemon.launch.state / JOURNAL).read_text()

    def begin(self, daemon: Environment, guard: Environment) -> None:
        """Start both."""
        for process, version in ((self.daemon, daemon), (self.guard, guard)):
            _start(process, version)
        self.daemon.wait_staged()

    def change(self, version: Environment, order: Iterable[str]) -> None:
        """End each, if it runs, and start it as that version. Whoever runs goes on, and keeps a GPU for itself."""
        for name in order:
            process = self.guard if name == "guard" else self.daemon
            assert process.ended() is not None or process.terminate() == 0
            _start(process, version)
            self.check()
        self.daemon.wait_staged()

    def run(self, name: str, claim: str, namespace: str = "default") -> None:
        """A container that must go on running."""
        self.stay.append(self.site.run(name, claim, namespace))

    def check(self) -> None:
        assert [self.site.state(each) for each in self.stay] == ["RUNNING"] * len(self.stay)
        for process in (self.daemon, self.guard):
            assert "Traceback" not in process.log()

    def busy(self, claim: str, why: str = r"\[gpu-busy\]") -> None:
        """Nobody else gets that GPU."""
        with pytest.raises(CriError, match=why):
            self.site.run("other", claim)
        self.site.node.cri.remove_pod_named("other")

    def not_started(self, container: ContainerId) -> None:
        """Its GPU went to another one."""
        with pytest.raises(CriError, match=r"\[gpu-busy\].* another (one|container)"):
            self.site.node.cri.start(container)

    def next_to(self, claim: str, name: str) -> None:
        """A container that gets its GPU once the one before it has lapsed."""
        cri = self.site.node.cri
        spec = ContainerSpec(command=("/bin/sleep", "3600"))
        self.stay.append(cri.run_persistently(cri.asking(claim, name), spec, "gpu-busy"))


def _start(process: NriGpu, version: Environment) -> None:
    process.launch = replace(process.launch, environment={**process.launch.environment, **version})
    process.start()
    process.wait_ready()


@pytest.fixture
def traces(folder: Path) -> Path:
    made = folder / "traces"
    made.mkdir()
    return made


@pytest.mark.parametrize("older", ["daemon", "guard"])
def test_one_of_each_version(node: Containerd, launch: Launch, traces: Path, older: str) -> None:
    versions = (released(), TODAY) if older == "daemon" else (TODAY, released())
    with Node(Site(node, traces), launch.with_policy(IGNORING)) as both:
        both.begin(*versions)
        both.run("granted", ASKS)
        both.run("ignored", ASKS, IGNORED)
        late = both.site.create("late", "device=1")
        signed = node.cri.status(both.stay[1]).oci["annotations"].get(GRANT_KEY, "")
        assert ("mode=none" in signed) is (older == "guard")
        both.daemon.kill()
        node.cri.start(late)
        both.run("ignored-too", ASKS, IGNORED)
        both.site.refused("ungranted", "device=2")
        both.check()


@pytest.mark.parametrize(
    ("order", "cgroup"),
    [(("daemon", "guard"), Cgroup.V1), (("guard", "daemon"), Cgroup.V2)],
    ids=["daemon first", "guard first"],
    indirect=["cgroup"],
)
def test_to_this_version_and_back(
    runtime: packages.Runtime, cgroup: Cgroup, folder: Path, traces: Path, order: tuple[str, str]
) -> None:
    before = released()
    with Containerd(runtime, cgroup=cgroup) as node:
        launch = launch_on(node, folder).with_policy(IGNORING + policy(node))
        with Node(Site(node, traces), launch, OnV1 if cgroup is Cgroup.V1 else NriGpu) as both:
            both.begin(before, before)
            with Holder.with_children(node) as holder:
                both.run("granted", "device=1")
                both.run("ignored", "device=1", IGNORED)
                both.daemon.wait_held({"pod/main": [UUIDS[0]], "granted/main": [UUIDS[1]]})
                both.daemon.kill()
                both.run("alone", "device=1", IGNORED)
                node.ctr("tasks", "pause", holder.container)
                node.restart()

                both.change(TODAY, order)
                wait_for("the container to be lost", lambda: both.daemon.status()["lost"], READY_S)
                both.busy("device=0", "ended, but its processes live on")
                both.busy("device=1")
                both.run("signed", "device=1", IGNORED)
                of = node.cri.asking("device=2", "late")
                late, later = (node.cri.create(of, ContainerSpec(name=name)) for name in ("late", "later"))
                gone = both.site.create("gone", "device=3")
                both.next_to("device=2", "second")
                both.next_to("device=3", "third")
                node.cri.remove(gone)
                wait_for("the journal", lambda: f'"removed":["{gone}"]' in both.journal, READY_S)

                both.change(before, order)
                held = {"granted/main": [UUIDS[1]], "second/main": [UUIDS[2]], "third/main": [UUIDS[3]]}
                both.daemon.wait_held({**held, "signed/main": []})  # and of lost ones it knows nothing
            both.busy("device=2")
            both.not_started(late)

            both.change(TODAY, order)
            both.daemon.wait_held(held)
            both.daemon.kill()
            both.not_started(later)
            time.sleep(LATER_S)
            both.check()
            assert WITHOUT not in both.guard.log()


@on_newest
@pytest.mark.parametrize("order", [("daemon", "guard"), ("guard", "daemon")], ids=["daemon first", "guard first"])
def test_a_policy_that_vanished(node: Containerd, launch: Launch, traces: Path, order: tuple[str, str]) -> None:
    """Today's daemon keeps it; the one before takes the defaults, and forgets it."""
    before, file = released(), launch.base.with_name("policy.toml")
    file.write_text(IGNORING + policy(node))
    state = {"STATE_DIRECTORY": str(launch.base.parent)}
    with Node(Site(node, traces), replace(launch, default_policy=file, environment=state)) as both:
        both.begin(TODAY, TODAY)
        both.run("granted", ASKS)
        both.run("ignored", ASKS, IGNORED)
        both.daemon.kill()
        both.run("alone", ASKS, IGNORED)
        file.rename(file.with_suffix(".away"))
        both.change(TODAY, order)
        both.run("kept", ASKS, IGNORED)

        both.change(before, order)
        assert (both.daemon.launch.state / LAST_GOOD).read_text() == ""
        both.run("asks", "device=1", IGNORED)

        both.change(TODAY, order)
        both.busy("device=2", r"\[bad-policy\].*is missing, and a policy was in force")
        file.with_suffix(".away").rename(file)
        both.daemon.reload()
        both.run("ignored-again", "device=2", IGNORED)
        both.busy("device=1")
        time.sleep(LATER_S)
        both.check()
