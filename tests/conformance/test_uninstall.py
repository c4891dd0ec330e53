"""What the documentation says to run leaves no trace: its own commands, on what the programs really made.

A daemon, a guard and a kubelet run on a private tree that stands for `/`; the daemon is killed, so that it cannot tidy
up. What only a cluster or a service manager could run (`helm`, `kubectl`, `systemctl`) is left out.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from nri_gpu.enable.features import FEATURES, SERVICE
from nri_gpu.enable.installation import Installation
from nri_gpu.enable.unit_changes import do
from nri_gpu.enable.unit_plan import ChangeFile
from nri_gpu.policy.model import Policy
from tests.support.daemon import ENVIRONMENT, FOUR_GPUS
from tests.support.driver_root import make_driver_root
from tests.support.kubelet import Kubelet
from tests.support.pages import commands
from tests.support.waiting import wait_for

ROOT: Final = Path(__file__).parents[2]
GPU: Final = "nvidia.com/gpu"
STARTS_S: Final = 30.0
# What is there before us: the distribution's, the kubelet's, Node Feature Discovery's.
BEFORE: Final = (
    *("etc/systemd/system", "etc/kubernetes/node-feature-discovery/features.d", "usr/local/bin", "opt", "proc"),
    *("run/cdi", "var/run/cdi", "var/run/nri", "var/lib/kubelet/device-plugins", "var/lib/kubelet/plugins_registry"),
    "var/lib/kubelet/plugins",
    *(f"usr/local/share/{name}" for name in ("man/man1", "man/man5", "man/man7")),
    "usr/local/share/bash-completion/completions",
    *(f"usr/local/share/{name}" for name in ("zsh/site-functions", "fish/vendor_completions.d")),
)


@pytest.fixture
def root(folder: Path) -> Path:
    for name in BEFORE:
        (folder / name).mkdir(parents=True)
    return folder


def run(lines: Sequence[str], root: Path) -> None:
    """As root on that tree would; /proc is this machine's, for its question is asked of every process."""
    for line in lines:
        before = tree(root)
        private = re.sub(r"(?<=\s)/(?!proc/)", f"{root}/", line)
        done = subprocess.run(["bash", "-c", private], cwd=ROOT, capture_output=True, text=True, check=False)
        # What the question finds is of the whole machine, whose processes come and go.
        assert done.returncode == 0 or line.startswith("grep"), (private, done.stderr)
        assert not line.startswith("rm") or tree(root) < before, f"it takes nothing away: {line}"


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


async def live(root: Path, elsewhere: Path) -> None:
    """Both programs do all that leaves something on a node, and die. elsewhere: for what is not theirs."""
    async with asyncio.timeout(60), Kubelet(root / "var/lib/kubelet") as kubelet:
        shared = ["--socket", f"{root}/var/run/nri/nri.sock", "--state-dir", f"{root}/run/nri-gpu"]
        labels = root / "etc/kubernetes/node-feature-discovery/features.d/nri-gpu"
        policy = elsewhere / "policy.toml"
        policy.write_text(
            f'[kubelet]\ndir = "{kubelet.dir}"\nregistry_dir = "{kubelet.registry}"\nregistration = "watcher"\n'
            f'cdi_dir = "{root}/var/run/cdi"\n'
        )
        started = [
            start("run", *shared, "--kubelet-registration=register", *daemon_options(root, elsewhere, policy, labels)),
            start("guard", *shared, "--policy", str(policy), "--run-dir", f"{root}/run/nri-gpu-guard"),
        ]
        try:
            await kubelet.wait("a registration", lambda: kubelet.capacity(GPU) == 4, STARTS_S)
            await asyncio.to_thread(wait_for, "the labels", labels.is_file, STARTS_S)
            stage = root / "var/lib/nri-gpu/drivers"
            await asyncio.to_thread(wait_for, "staged files", lambda: any(stage.rglob("libcuda.so*")), STARTS_S)
            guarding = root / "run/nri-gpu-guard"
            await asyncio.to_thread(wait_for, "the guard", lambda: any(guarding.glob("*")), STARTS_S)
        finally:
            for process in started:
                process.send_signal(signal.SIGKILL)
                process.wait()
        # Killed while it wrote them.
        labels.with_name(".nri-gpu.new").write_text("half")
        (kubelet.dir / ".nri-gpu.key.4711").write_text("half")
        prepared_a_claim(root)
    (kubelet.dir / "kubelet.sock").unlink(missing_ok=True)


def prepared_a_claim(root: Path) -> None:
    """What `nri-gpu dra` leaves when it is killed."""
    policy = Policy.default()
    folder = root / policy.dra.dir.strip("/") / policy.dra.driver
    folder.mkdir()
    for path in (
        folder / "dra.sock",
        root / policy.kubelet.registry_dir.strip("/") / f"{policy.dra.driver}-reg.sock",
        root / policy.kubelet.cdi_dir.strip("/") / "nri-gpu-claim-0a1b.json",
    ):
        path.touch()


def daemon_options(root: Path, elsewhere: Path, policy: Path, labels: Path) -> list[str]:
    staged, driver = f"{root}/var/lib/nri-gpu/drivers", make_driver_root(elsewhere / "driver")
    (root / "var/lib/nri-gpu").mkdir(exist_ok=True)
    (root / "var/lib/nri-gpu/drivers").mkdir(exist_ok=True)
    options = {"--policy": policy, "--labels": labels, "--stage-dir": staged, "--driver-root": driver}
    joined = f"--socket={Policy.default().plugin.socket}"
    return ["--kubelet", f"--gpus={FOUR_GPUS}", joined, *(f"{key}={value}" for key, value in options.items())]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    program = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "nri_gpu", *arguments]
    return subprocess.Popen(program, env=dict(ENVIRONMENT), cwd="/", stderr=subprocess.DEVNULL)


def left_by(before: set[str], root: Path) -> set[str]:
    return tree(root) - before


def test_a_cluster_leaves_no_trace(root: Path, tmp_path: Path) -> None:
    before = tree(root)
    asyncio.run(live(root, tmp_path))
    names = left_by(before, root)
    assert {"var/lib/kubelet/device-plugins/nri-gpu.key", "run/nri-gpu/key"} <= names
    assert "var/run/cdi/nri-gpu-required.json" in names
    assert [name for name in names if re.fullmatch(r"var/lib/kubelet/device-plugins/nri-gpu-.*\.sock", name)]
    lines = commands("upgrade.md", "What is left on a node")
    run([*lines, f"rm -rf {root}/run/nri-gpu-guard".replace(str(root), "")], root)  # an emptyDir in the chart
    assert left_by(before, root) == set()


def test_a_plain_host_leaves_no_trace(root: Path, tmp_path: Path) -> None:
    before = tree(root)
    files = [line for page in ("install.md", "guard.md") for line in installing(page)]
    assert len(files) >= 2
    (root / "opt/nri-gpu/bin").mkdir(parents=True)
    shutil.copytree(ROOT / "share", root / "opt/nri-gpu/share", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    run(files, root)
    for service in ("nri-gpu", "nri-gpu-guard"):
        target = f"/etc/systemd/system/{service}.service.d/snaps.conf"
        run([f"install -D -m 0644 systemd/nri-gpu.service.d/snaps.conf {target}"], root)
    opt = Path("/opt/nri-gpu")
    checkout = Installation(opt / "bin/nri-gpu", ROOT / "systemd", opt / "bin/python3", opt / "lib")
    for feature in FEATURES.values():  # as `nri-gpu enable`, but for what systemctl links
        do([ChangeFile(path, None, file) for path, file in checkout.wanted(feature, SERVICE, root).items()], root)
    (root / "run/cdi/nri-gpu.json").write_text("{}")
    asyncio.run(live(root, tmp_path))
    assert {"etc/systemd/system/nri-gpu.service.d/kubelet.conf", "etc/nri-gpu/policy.toml"} <= left_by(before, root)
    for part in ("Uninstall a checkout", "What is left on a node"):
        run(commands("upgrade.md", part), root)
    assert left_by(before, root) == set()


def installing(page: str) -> list[str]:
    """The lines of a page that put files of this tree on a host."""
    return re.findall(
        r"^(?:install -|ln -s |cp -r /opt/)[^&\n]*", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE
    )
