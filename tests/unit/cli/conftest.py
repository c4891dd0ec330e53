"""`nri-gpu` in this process: what it printed and its exit code."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from nri_gpu.cli.main import main
from tests.support import builders as make
from tests.support.daemon import FOUR_GPUS
from tests.support.schemas import conforming
from tests.support.views import status_json, view


class Done(Struct, frozen=True):
    """One run of a verb."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:  # noqa: ANN401 - parsed JSON
        """What `-o json` printed, held against its schema."""
        return conforming(json.loads(self.out))


NriGpuCall = Callable[..., Done]
FREE = status_json(view(node=make.node(driver_version="580.95.05")))


@contextmanager
def daemon(folder: Path, answer: bytes) -> Iterator[Path]:
    """Something that answers one question with these bytes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control.sock"))
        listener.listen()

        def serve() -> None:
            question = b"usage\n"
            while question == b"usage\n":  # which the verb asks first, and goes on without an answer
                connection, _ = listener.accept()
                with connection:
                    question = connection.recv(100)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield folder
        thread.join()
        (folder / "control.sock").unlink()


@pytest.fixture
def nri_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NriGpuCall:
    """Calls a verb with these arguments. The policy of the machine that tests run on does not matter."""
    monkeypatch.setattr("nri_gpu.records.policy_file.DEFAULT_PATH", tmp_path / "default-policy.toml")
    for verb in ("check_command", "follow_daemon"):
        monkeypatch.setattr(f"nri_gpu.cli.{verb}.DEFAULT_PATH", tmp_path / "default-policy.toml")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "lib"))

    def call(*arguments: object) -> Done:
        code = main([str(each) for each in arguments])
        return Done(code, *capsys.readouterr())

    return call


Explain = Callable[..., Done]


@pytest.fixture
def explain(tmp_path: Path, nri_gpu: NriGpuCall) -> Explain:
    def run(manifest: str, *options: object, policy: str = "") -> Done:
        (tmp_path / "policy.toml").write_text(policy)
        (tmp_path / "pod.yaml").write_text(manifest)
        always = ("--gpus", FOUR_GPUS, "--policy", tmp_path / "policy.toml", "--driver-root", tmp_path)
        return nri_gpu("explain", tmp_path / "pod.yaml", *always, *options)

    return run


def containers(explain: Explain, manifest: str, *options: object, policy: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = explain(manifest, "-o", "json", *options, policy=policy).document["containers"]
    return found
