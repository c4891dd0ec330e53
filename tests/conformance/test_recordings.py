"""Sessions recorded on real containerds: the ones checked in are still what a runtime and we say to each other.

With NRI_GPU_RECORD=1 the recordings in tests/fixtures/wire are written anew instead.
"""

import os
import platform
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from tests.support.containerd import Containerd
from tests.support.cri import ContainerId, CriError, PodId
from tests.support.daemon import UUIDS, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.image import ImageSpec
from tests.support.packages import Version
from tests.support.plugin import KEY
from tests.support.pods import ContainerSpec
from tests.support.recorder import Message, Recorder, Session, render, split
from tests.support.scrub import scrubbed
from tests.unit.nri.replaying import FOLDER_NAME, messages_of, path_of

pytestmark = [
    pytest.mark.containerd(Version.V1_7, Version.V2_1),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="recorded on x86-64, where the loader has more folders"),
]

RECORD: Final = os.environ.get("NRI_GPU_RECORD") == "1"
NRI: Final = {"1.7": "0.6.1", "2.1": "0.8.0"}
LONG_PATH: Final = ImageSpec(
    "localhost/nri-gpu/long-path:1",
    env={"LD_LIBRARY_PATH": ":".join(f"/opt/application/component-{n:03}/lib" for n in range(120))},
)
HEADER: Final = """\
containerd {version}, nri {nri}: {what}
Recorded between a real containerd and a real `nri-gpu run --gpus config/topologies/four-gpus.toml` by a man in the
middle (tests/support/recorder.py; NRI_GPU_RECORD=1 pytest tests/conformance/test_recordings.py makes it anew). All is
as it was captured, but for what tests/support/scrub.py replaces: container, pod and image ids, pod uids, pids, host
name, paths of the test, the driver's generation, and the time left of a request's timeout (2 s). The macs of signed
grants cover ids and were recomputed for the replaced ones; the key is bytes 00 to 1f."""


class ServedNode(Struct, frozen=True):
    """A node, and nri-gpu connected to it through a recorder."""

    node: Containerd
    daemon: NriGpu
    recorder: Recorder

    def begin(self) -> None:
        """A session: the daemon started, ready, with a driver."""
        self.daemon.start()
        self.daemon.wait_staged()

    def create(self, name: str, value: str = "", spec: ContainerSpec | None = None) -> ContainerId:
        return self.node.cri.create(self.node.cri.asking(value, name), spec)

    def run(self, name: str, value: str = "") -> ContainerId:
        container = self.create(name, value)
        self.node.cri.start(container)
        return container

    def end_pod(self, name: str) -> None:
        pod = next(PodId(each.id) for each in self.node.cri.pods() if each.metadata.name == name)
        self.node.cri.stop_pod(pod)
        self.node.cri.remove_pod(pod)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a name that never differs in length, and short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ng-rec-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def served(node: Containerd, folder: Path) -> Iterator[ServedNode]:
    driver = make_driver_root(folder / "driver")
    launch = Launch(folder / "d", folder / "nri.sock", driver_root=driver).with_policy("schema = 1\n")
    launch.state.mkdir(parents=True)
    key = launch.state / "key"
    key.touch(mode=0o600)  # one that others may read is no key
    key.write_bytes(KEY)
    with Recorder(launch.socket, node.nri_socket) as recorder:
        daemon = NriGpu(launch)
        yield ServedNode(node, daemon, recorder)
        daemon.__exit__()


def one_life(served: ServedNode) -> Session:
    """register, configure, nothing to synchronize; a grant, created, started, stopped, removed, and its pod."""
    served.begin()
    container = served.run("train", "device=0,2")
    served.node.cri.stop(container)
    served.daemon.wait_held({})
    served.node.cri.remove(container)
    served.end_pod("train")
    return served.recorder.sessions[0]


def refusal(served: ServedNode) -> Session:
    """A refused container, which the runtime takes back by events; and one that asks for nothing."""
    served.begin()
    with pytest.raises(CriError, match="no-such-gpu"):
        served.create("greedy", "device=0,9")
    served.run("bystander")
    return served.recorder.sessions[0]


def second_session(served: ServedNode) -> Session:
    """Two containers to synchronize, of which one is not started yet, and is then."""
    served.begin()
    served.run("runs", "device=1; mode=shared")
    created = served.create("waits", "device=3")
    served.daemon.kill()
    served.begin()
    served.node.cri.start(created)
    served.daemon.wait_held({"runs/main": [UUIDS[1]], "waits/main": [UUIDS[3]]})
    return served.recorder.sessions[1]


def long_reply(served: ServedNode) -> Session:
    """An image with a long LD_LIBRARY_PATH, and so a reply of two mux frames."""
    served.node.import_image(LONG_PATH)
    served.begin()
    served.create("long", "1", ContainerSpec(image=LONG_PATH.name))
    return served.recorder.sessions[0]


@pytest.mark.parametrize("scenario", [one_life, refusal, second_session, long_reply], ids=lambda each: each.__name__)
def test_what_is_said_is_what_was_recorded(
    served: ServedNode, folder: Path, scenario: Callable[[ServedNode], Session]
) -> None:
    session = scenario(served)
    served.daemon.terminate()
    messages = scrubbed(split(session), KEY, _names(served.node, folder))
    path = path_of(scenario.__name__, ".".join(map(str, served.node.runtime.number)))
    if RECORD:
        path.write_text(render(_header(messages, scenario.__doc__ or ""), messages))
        assert path.stat().st_size < 60_000
    recorded = messages_of(path)
    assert _said_by_us(messages) == _said_by_us(recorded)
    assert _asked_of_us(messages) == _asked_of_us(recorded)


def _said_by_us(messages: list[Message]) -> list[tuple[str, bytes]]:
    """What we send does not depend on the machine, so it is equal to the byte but for the order of a map."""
    ours = [message for message in messages if not message.from_runtime]
    return [(message.comment, message.body.SerializeToString(deterministic=True)) for message in ours]


def _asked_of_us(messages: list[Message]) -> list[str]:
    return [message.comment for message in messages if message.from_runtime and message.is_request]


def _names(node: Containerd, folder: Path) -> dict[str, str]:
    host = f"HOSTNAME={socket.gethostname()}"
    return {
        node.base.name: re.sub("(?<=^ng-).*", lambda found: "0" * len(found[0]), node.base.name),
        folder.name: FOLDER_NAME,
        host: f"HOSTNAME={'node' * 16}"[: len(host)],
    }


def _header(messages: list[Message], what: str) -> str:
    [configure] = [message for message in messages if message.method == "Configure" and message.is_request]
    version = configure.body.runtime_version
    return HEADER.format(version=version, nri=NRI[version[:3]], what=what.strip())
