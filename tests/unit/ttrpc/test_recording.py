from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recording import parse, recordings, replay


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.stem)
def test_we_send_the_bytes_of_the_recording(path: Path) -> None:
    for write, _, ours in replay(parse(path.read_text())):
        assert ours == write.data, f"line {write.line}: {write.comment}"
