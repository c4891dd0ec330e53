"""`doctor` beside two real containerds of which the second took the NRI socket from the first."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from nri_gpu.doctor.examine import examine
from nri_gpu.doctor.examined import Examined
from nri_gpu.doctor.runtimes import container_runtime
from nri_gpu.domain.finding import Level
from nri_gpu.policy.model import Policy
from nri_gpu.system.sockets import SocketState, socket_state
from tests.support import config, packages
from tests.support.waiting import wait_for

BOOT_S = 30.0


def containerd(runtime: packages.Runtime, folder: Path, socket: Path, *, cri: bool = True) -> subprocess.Popen[bytes]:
    """One without containers, in the host's namespaces, as `doctor` looks for it."""
    folder.mkdir()
    layout = config.Layout(folder)
    v3 = runtime.number >= (2, 0)
    text = config.render(layout, v3=v3, runc=packages.runc(), nri=True, request_timeout_s=2.0)
    text = text.replace(str(layout.nri_socket), str(socket))
    off = "" if cri else 'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"]\n'
    layout.config.write_text(off + text)
    with layout.log.open("wb") as log:
        return subprocess.Popen([runtime.containerd, "-c", layout.config], stdout=log, stderr=log)


def test_the_owner_is_told_from_the_one_that_lost_the_socket(runtime: packages.Runtime, tmp_path: Path) -> None:
    socket = tmp_path / "nri.sock"
    policy = Policy.default()
    seen = Examined(policy=replace(policy, plugin=replace(policy.plugin, socket=str(socket))))

    def owner() -> int:
        found = container_runtime(seen)
        return found.process.pid if found and found.process and found.listens and found.certain else 0

    with ExitStack() as ends:
        pids = []
        for name, cri in (("dockers", False), ("first", True), ("second", True)):
            process = containerd(runtime, tmp_path / name, socket, cri=cri)
            ends.callback(process.wait)
            ends.callback(process.terminate)
            pids.append(process.pid)
            if cri:
                wait_for(name, lambda: owner() == pids[-1], BOOT_S)
        found = container_runtime(seen)
        assert found is not None
        told = {each.meaning: each.level for each in examine(seen, found).findings if each.subject == "second runtime"}
        lost = next(text for text in told if f"pid {pids[1]}," in text)
        assert (told[lost], "until the runtime above took it" in lost) == (Level.ERROR, True)
        assert any(f"pid {pids[0]}," in text and "does not use" in text for text in told)
        assert socket_state(socket) is SocketState.LIVE
