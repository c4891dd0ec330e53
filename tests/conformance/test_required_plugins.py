"""containerd's own validator and the plugins that a node or a pod requires, by the lines of our drop-in.

A plugin is required by its name without index. The runtime counts as there whoever was connected when a creation began.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.conftest import launch_on
from tests.support import packages
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError
from tests.support.daemon import Launch, NriGpu, staged
from tests.support.guard import NriGuard
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.unread import unread_bytes
from tests.support.waiting import wait_for

pytestmark = pytest.mark.containerd(packages.Version.V2_3, packages.Version.V2_4)

DROP_IN: Final = Path(__file__).parents[2] / "config" / "containerd" / "required-plugins.toml"
TABLE: Final = '[plugins."io.containerd.nri.v1.nri".default_validator]\n'
KEY: Final = "required-plugins.noderesource.dev"
TOLERATES: Final = "tolerate-missing.gpu.nri.io"
OURS: Final = '["nri-gpu"]'
MISSING: Final = 'required plugin "nri-gpu" not present'
SHORT_S: Final = 1.0  # the request timeout, so that a plugin that hangs is late soon


def with_file(runtime: packages.Runtime, text: str) -> Iterator[Containerd]:
    """A node whose config.toml, which has NRI's table, imports a file of that text."""
    node = Containerd(runtime, request_timeout_s=SHORT_S)
    (node.base / "required.toml").write_text(text)
    config = node.layout.config.read_text()
    node.layout.config.write_text(f'imports = ["{node.base}/required.toml"]\n{config}')
    with node:
        yield node


@pytest.fixture(scope="module")
def asked(runtime: packages.Runtime) -> Iterator[Containerd]:
    """A node whose validator is on, and requires what a pod says."""
    yield from with_file(runtime, f"version = 3\n{TABLE}  enable = true\n")


@pytest.fixture(scope="module")
def strict(runtime: packages.Runtime) -> Iterator[Containerd]:
    """A node with the drop-in."""
    yield from with_file(runtime, DROP_IN.read_text())


def created(node: Containerd, annotations: dict[str, str], *, claim: str = "", name: str = "main") -> ContainerId:
    asks = {"gpu.nri.io": claim} if claim else {}
    return node.cri.create(node.cri.run_pod(PodSpec(annotations=annotations | asks)), ContainerSpec(name=name))


def refused(node: Containerd, annotations: dict[str, str], why: str = MISSING, *, claim: str = "") -> None:
    with pytest.raises(CriError) as caught:
        created(node, annotations, claim=claim)
    assert why in caught.value.details


@pytest.fixture
def launch(asked: Containerd, folder: Path) -> Iterator[Launch]:
    yield launch_on(asked, folder)
    asked.cri.remove_all()


@pytest.fixture
def guard(launch: Launch) -> Iterator[NriGuard]:
    with NriGuard(launch) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def daemon(launch: Launch) -> Iterator[NriGpu]:
    with staged(launch) as running:
        yield running


@pytest.mark.parametrize("key", [KEY, f"{KEY}/pod", f"{KEY}/container.main"])
def test_a_pod_that_requires_us_is_created_while_we_are_connected(
    asked: Containerd, launch: Launch, guard: NriGuard, key: str
) -> None:
    """The guard grants nothing, and does not stand for the daemon."""
    refused(asked, {key: OURS}, claim="none")
    created(asked, {})
    with staged(launch) as daemon:
        created(asked, {key: OURS}, claim="device=0")
        daemon.terminate()
    refused(asked, {key: OURS}, claim="none")
    created(asked, {key: '["nri-gpu-guard"]'})
    assert guard.has_notified("READY=1")


def test_its_value_is_a_yaml_list_of_names(asked: Containerd, daemon: NriGpu) -> None:
    """With the index of a plugin or without it. All else costs that pod its start, and nothing more on the node."""
    for value in ("[nri-gpu]", "- nri-gpu\n", "[10-nri-gpu]", "[]", "", "null"):
        created(asked, {f"{KEY}/pod": value}, claim="none")
    for value, missing in {
        "[11-nri-gpu]": 'required plugin "11-nri-gpu" not present',
        "[nri-gpu, not-there]": 'required plugin "not-there" not present',
        "[a, b]": 'required plugins "a,b" not present',
    }.items():
        refused(asked, {f"{KEY}/pod": value}, missing, claim="none")
    for value in ("nri-gpu", "{nri-gpu: true}", "[nri-gpu"):
        refused(asked, {f"{KEY}/pod": value}, f'invalid {KEY} annotation "{value}": yaml: ', claim="none")
        created(asked, {})


@pytest.mark.parametrize(
    ("annotations", "holds"),
    [
        ({KEY: OURS, f"{KEY}/pod": "[]"}, False),
        ({f"{KEY}/pod": OURS, KEY: "[]"}, True),
        ({f"{KEY}/pod": OURS, f"{KEY}/container.main": "[]"}, False),
        ({f"{KEY}/pod": OURS, f"{KEY}/container.other": "[]"}, True),
        ({f"{KEY}/pod": OURS, TOLERATES: "true"}, True),
        ({f"{KEY}/containers": OURS, f"{KEY}/container.other": OURS}, False),
    ],
)
def test_the_most_special_key_counts(asked: Containerd, annotations: dict[str, str], holds: bool) -> None:
    """A key of another container changes nothing, nor does a toleration that the node does not name."""
    if holds:
        refused(asked, annotations)
    else:
        created(asked, annotations)
    asked.cri.remove_all()


@pytest.mark.parametrize("guarded", [True, False], ids=["beside the guard", "alone"])
@pytest.mark.parametrize("late", [True, False], ids=["late", "killed"])
def test_gone_in_the_middle_of_a_creation(asked: Containerd, launch: Launch, guarded: bool, late: bool) -> None:
    """It counts as connected, and is a validator without a verdict: neither this nor the next attempt is created.

    A containerd with NRI 0.12.5 asks no validator that it has closed, and creates it where no guard is (upstream.md).
    """
    with ExitStack() as stack:
        daemon, aside = stack.enter_context(staged(launch)), stack.enter_context(ThreadPoolExecutor(1))
        if guarded:
            stack.enter_context(NriGuard(launch)).wait_ready()
        pod = asked.cri.run_pod(PodSpec(annotations={f"{KEY}/pod": OURS, "gpu.nri.io": "device=0"}))
        os.kill(daemon.pid, signal.SIGSTOP)
        if late:
            stack.callback(os.kill, daemon.pid, signal.SIGCONT)
        creating = aside.submit(asked.cri.create, pod, ContainerSpec())
        wait_for("the request to reach it", lambda: unread_bytes(daemon.pid) > 0, 20)
        if not late:
            daemon.kill()
        with pytest.raises(CriError, match=r"validator plugin 10-nri-gpu failed|not-granted"):
            creating.result()
        with pytest.raises(CriError, match=rf"{MISSING}|not-granted"):  # validators are asked at the same time
            asked.cri.create(pod, ContainerSpec(attempt=1))


def test_killed_between_two_creations(asked: Containerd, daemon: NriGpu) -> None:
    """No other request tells the runtime of it: the next creation is the first that could miss it."""
    pod = asked.cri.run_pod(PodSpec(annotations={f"{KEY}/pod": OURS, "gpu.nri.io": "device=0"}))
    daemon.kill()
    for attempt in range(2):
        with pytest.raises(CriError, match=f"validator plugin 10-nri-gpu failed|{MISSING}"):
            asked.cri.create(pod, ContainerSpec(attempt=attempt))
    daemon.start()
    daemon.wait_staged()
    asked.cri.create(pod, ContainerSpec(attempt=2))


def test_the_drop_in(strict: Containerd, folder: Path) -> None:
    """Every pod waits for both, but for those that tolerate it, and no pod can say less than the node does."""
    launch = launch_on(strict, folder)
    both = 'required plugins "nri-gpu,nri-gpu-guard" not present'
    refused(strict, {}, both)
    refused(strict, {KEY: "[]"}, both)
    for key in (TOLERATES, f"{TOLERATES}/pod", f"{TOLERATES}/container.main"):
        created(strict, {key: "true", KEY: OURS})
        refused(strict, {key: "false"}, both)
        refused(strict, {key: "yes"}, f'invalid {TOLERATES} annotation "yes"')
    with staged(launch):
        refused(strict, {}, 'required plugin "nri-gpu-guard" not present')
        with NriGuard(launch) as guard:
            guard.wait_ready()
            created(strict, {})
    strict.cri.remove_all()


@pytest.mark.containerd(packages.Version.V2_1)
def test_an_older_containerd_starts_with_it_and_requires_nobody(strict: Containerd) -> None:
    created(strict, {KEY: OURS})
    strict.cri.remove_all()
