"""Root's word that a GPU was reset."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.domain.errors import Exit
from tests.support.daemon import FOUR_GPUS, UUIDS, Launch, NriGpu
from tests.support.waiting import wait_for
from tests.unit.cli.conftest import NriGpuCall


def test_where_no_daemon_runs(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    done = nri_gpu("repaired", "0", "--state-dir", tmp_path)
    assert (done.code, done.out) == (Exit.UNAVAILABLE, "")
    assert "is `nri-gpu run` running?" in done.err


def test_what_it_says_of_each_gpu(nri_gpu: NriGpuCall, tmp_path: Path) -> None:
    """Over the daemon's own socket; a due reset is the daemon's next start's, too."""
    topology = tmp_path / "node.toml"
    topology.write_text(FOUR_GPUS.read_text() + "[[event]]\nat_s = 0\ngpu = 3\nxid = 46\n")
    launch = Launch(tmp_path / "d", tmp_path / "no-runtime", topology=topology)

    def said(gpu: str) -> tuple[int, str]:
        done = nri_gpu("repaired", gpu, "--state-dir", launch.state)
        return done.code, done.out + done.err

    with NriGpu(launch) as daemon:
        wait_for("a due reset", lambda: daemon.verb("status").stdout.count("nri-gpu repaired") == 1, 20)
        topology.write_text(FOUR_GPUS.read_text())
        daemon.kill()
        daemon.start()
        wait_for("it again", lambda: daemon.verb("status").stdout.count("nri-gpu repaired") == 1, 20)
        assert said("9") == (
            Exit.FINDING,
            "nri-gpu: no GPU 9: name it by UUID, index or PCI address, see nri-gpu status\n",
        )
        assert said(UUIDS[0]) == (Exit.FINDING, f"nri-gpu: {UUIDS[0]}: no reset is due, so nothing changed\n")
        done = said(UUIDS[3])
        assert done == (
            Exit.OK,
            f"{UUIDS[3]} counts as reset (it was withheld because a reset is due since XID 46, GPU stopped "
            "processing): it is granted after 300 s without trouble\n",
        )
        assert said("3")[0] is Exit.FINDING
        wait_for("nothing due", lambda: "nri-gpu repaired" not in daemon.verb("status").stdout, 20)
        assert 'reason="a reset is due since XID 46' in daemon.wait_logged("root reported a GPU as reset")


@pytest.mark.parametrize("word", ["", "GPU-" + "0" * 100])
def test_words_that_are_no_gpu(nri_gpu: NriGpuCall, tmp_path: Path, word: str) -> None:
    with NriGpu(Launch(tmp_path / "d", tmp_path / "no-runtime")) as daemon:
        wait_for("an answer", lambda: daemon.verb("status").returncode in (0, 1), 20)
        done = nri_gpu("repaired", word, "--state-dir", daemon.launch.state)
        assert done.code in (Exit.FINDING, Exit.UNAVAILABLE)
        assert done.err
