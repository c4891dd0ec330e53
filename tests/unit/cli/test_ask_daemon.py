"""Who is asked: the daemon, else an observer, or the only one that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_gpu.cli.ask_daemon import answering
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.system.server import listen


@pytest.mark.parametrize(
    ("there", "asked"),
    [((), "daemon"), (("daemon",), "daemon"), (("observer",), "observer"), (("daemon", "observer"), "daemon")],
)
def test_the_daemon_is_asked_else_an_observer(folder: Path, there: tuple[str, ...], asked: str) -> None:
    listening = []
    for name in there:
        (folder / name).mkdir()
        listening.append(listen(folder / name / CONTROL_SOCKET))
    assert answering(None, folder / "daemon", folder / "observer") == folder / asked
    assert answering("/named", folder / "daemon", folder / "observer") == Path("/named")
    for each in listening:
        each.close()


def test_a_daemon_that_ended_is_not_asked(folder: Path) -> None:
    """Its socket is left where it was killed."""
    for name in ("daemon", "observer"):
        (folder / name).mkdir()
    listen(folder / "daemon" / CONTROL_SOCKET).close()
    observer = listen(folder / "observer" / CONTROL_SOCKET)
    assert answering(None, folder / "daemon", folder / "observer") == folder / "observer"
    observer.close()
