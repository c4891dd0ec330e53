"""The kubelet's drop-in: every line says why, systemd has nothing against it, and the daemon serves a kubelet in it."""

from __future__ import annotations

import asyncio
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.policy.model import Policy
from tests.support import sandbox
from tests.support.daemon import Launch, NriGpu
from tests.support.kubelet import Kubelet
from tests.support.unit_file import OURS, Line, Unit

FILE = OURS.parent / "nri-gpu.service.d" / "kubelet.conf"
UNIT, MAIN = Unit.read(FILE), Unit.read()
VERIFY: dict[str, Any] = runpy.run_path(str(OURS.with_name("verify.py")))
GPU = "nvidia.com/gpu"
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


@pytest.mark.parametrize("line", UNIT.lines, ids=lambda line: f"{line.key}={line.value}"[:40])
def test_every_line_says_why(line: Line) -> None:
    assert line.why


def test_it_opens_the_kubelets_folders_and_keeps_hiding_the_rest() -> None:
    settings = Policy.default().kubelet
    writable, cdi = (Path(path) for path in UNIT.words("ReadWritePaths"))
    assert {Path(settings.dir).parent, Path(settings.registry_dir).parent} == {writable}
    first, hidden = UNIT.values("InaccessiblePaths")
    assert first == ""  # lists of systemd's add up until they are emptied
    kept = set(MAIN.words("InaccessiblePaths")) - {f"-{writable}"}
    assert set(hidden.split()) == kept | {f"-{writable}/pods", f"-{writable}/pki"}
    assert f"/var{cdi}" == settings.cdi_dir
    assert [line.split()[-1] for line in UNIT.values("ExecStartPre")] == [str(writable), str(cdi)]
    assert UNIT.words("RequiresMountsFor") == [str(writable)]


def test_the_kubelet_still_waits_for_the_unit() -> None:
    assert "kubelet.service" in MAIN.words("Before")
    assert not {"Before", "After", "Requires", "Wants"} & {line.key for line in UNIT.lines}


def test_the_documentation_installs_this_file() -> None:
    page = (OURS.parents[1] / "docs" / "kubernetes.md").read_text()
    where = FILE.relative_to(OURS.parents[1])
    assert f"install -D -m 0644 {where} /etc/systemd/system/nri-gpu.service.d/kubelet.conf" in page


@needs_systemd
def test_systemd_has_nothing_against_it() -> None:
    assert VERIFY["faults"](FILE) == []


@needs_systemd
@pytest.mark.parametrize(("key", "complaint"), [("InaccessiblePaths", "Unknown key"), ("RequiresMountsFor", "Unknown")])
def test_systemd_sees_what_is_wrong_with_it(key: str, complaint: str, tmp_path: Path) -> None:
    folder = tmp_path / FILE.parent.name
    folder.mkdir()
    (tmp_path / OURS.name).write_text(OURS.read_text())
    (folder / FILE.name).write_text(FILE.read_text().replace(f"\n{key}=", f"\n{key[:-1]}="))
    assert any(complaint in fault for fault in VERIFY["faults"](folder / FILE.name))


class Sandboxed(NriGpu):
    """In the unit's sandbox with what the drop-in adds."""

    def __init__(self, launch: Launch, kubelet: Path) -> None:
        super().__init__(launch)
        self._kubelet = kubelet
        for folder in (launch.state, launch.base / "drivers"):
            folder.mkdir()

    def program(self) -> list[str]:
        unit = self.launch.base / "nri-gpu.service"
        unit.write_text(f"{OURS.read_text()}\n{FILE.read_text()}")
        rw = (self.launch.state, self.launch.base / "drivers", self._kubelet)
        return sandbox.command([*super().program(), "--kubelet"], rw=rw, keep=[self.launch.base], unit=unit)


def test_it_serves_a_kubelet_in_the_units_sandbox() -> None:
    with tempfile.TemporaryDirectory(prefix="nri-gpu-test-") as made:
        asyncio.run(_serves(Path(made)))


async def _serves(folder: Path) -> None:
    (folder / "d").mkdir()
    policy = folder / "d" / "policy.toml"
    policy.write_text(f'[kubelet]\ndir = "{folder}/kubelet/device-plugins"\ncdi_dir = "{folder}/kubelet/cdi"\n')
    async with asyncio.timeout(60), Kubelet(folder / "kubelet") as kubelet:
        with Sandboxed(Launch(folder / "d", folder / "d" / "nri.sock", policy=policy), folder / "kubelet"):
            await kubelet.wait("a registration", lambda: kubelet.capacity(GPU) == 4)
            # No runtime is there, so none is offered yet.
            assert kubelet.healthy(GPU) == []
            # Made anew below the folder that the unit may write to.
            await kubelet.stop()
            shutil.rmtree(kubelet.dir)
            await kubelet.start()
            await kubelet.wait("a registration", lambda: kubelet.capacity(GPU) == 4)
