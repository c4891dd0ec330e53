"""Pages as a browser lays them out: Debian's headless Chromium, on files alone."""

from __future__ import annotations

import html
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.support import packages

PROGRAM: Final = "chromium-headless-shell"
# --virtual-time-budget: milliseconds of the pages' own clock, after which it answers, however long loading took.
OPTIONS: Final = (
    *("--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"),
    "--virtual-time-budget=600000",
)
TIMEOUT_S: Final = 180.0
# Each page is shown in a frame of that width, so that one start of the browser answers for all of them.
FRAMES: Final = """<!doctype html><style>body { margin: 0; } iframe { border: 0; height: 800px; }</style>
<pre id="answer"></pre>
<script>
async function ask(page, width, question) {
  const frame = document.createElement("iframe");
  frame.style.width = `${width}px`;
  frame.src = page;
  const loaded = new Promise((done) => (frame.onload = done));
  document.body.prepend(frame);
  await loaded;
  const answer = await question(frame.contentDocument, frame.contentWindow);
  if (!KEEP) frame.remove();
  return answer;
}
(async () => {
  const answers = [];
  for (const page of PAGES) answers.push(await ask(page, WIDTH, QUESTION));
  document.getElementById("answer").textContent = JSON.stringify(answers);
})();
</script>
"""


def answers(pages: Sequence[Path], width: int, question: str) -> list[Any]:
    """Return what a function of JavaScript answers about each page; it gets its document and its window."""
    shown = _run(pages, width, question, "--dump-dom")
    found = re.search(r'<pre id="answer">(.+?)</pre>', shown, re.DOTALL)
    assert found, f"the browser has no answer: {shown[-2000:]}"
    return list(json.loads(html.unescape(found[1])))


def screenshot(page: Path, width: int, change: str, into: Path) -> None:
    """Write a PNG of a page, after a function of JavaScript changed it."""
    _run([page], width, change, f"--screenshot={into}", f"--window-size={width},800")


def _run(pages: Sequence[Path], width: int, question: str, *options: str) -> str:
    words = {
        "PAGES": json.dumps([each.as_uri() for each in pages]),
        "WIDTH": str(width),
        "KEEP": str(options[0] != "--dump-dom").lower(),
        "QUESTION": question,
    }
    with tempfile.TemporaryDirectory(prefix="ng-browser-") as folder:
        frames = Path(folder, "frames.html")
        frames.write_text(re.sub(r"\b(PAGES|WIDTH|KEEP|QUESTION)\b", lambda found: words[found[0]], FRAMES))
        command = [*packages.command(PROGRAM), *OPTIONS, f"--user-data-dir={folder}/profile", *options]
        done = subprocess.run(
            [*command, frames.as_uri()], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
    return done.stdout
