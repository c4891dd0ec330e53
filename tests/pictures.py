"""Screenshots below docs/pictures: pages of `nri-gpu` as a terminal shows them, of nodes made up here.

python -m tests.pictures     writes them again
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec import to_builtins
from msgspec.structs import replace
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from nri_gpu.cli import terminal
from nri_gpu.cli.doctor_command import TONES
from nri_gpu.cli.live_screen import KEYS_LINE
from nri_gpu.cli.page import Line, Page, Tone
from nri_gpu.cli.render import Times
from nri_gpu.cli.status_page import status_page
from nri_gpu.cli.watch import Asked, live_page, moments
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.daemon.view import status_of
from nri_gpu.doctor.examine import paragraphs
from nri_gpu.domain.decision import Refused
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import Happened, HealthNotes, History
from nri_gpu.health.gpu_record import Moment
from nri_gpu.inventory.changes import changes
from nri_gpu.ledger.ledger import Entry
from nri_gpu.system.node_name import NamedNode
from tests.support import builders as make
from tests.support.health import after_xid
from tests.support.views import CLOCK, NOW, view
from tests.unit.cli.printed import observed_node
from tests.unit.doctor.node import DoctorNode, old_uvm
from tests.unit.host.host_tree import host_below

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"
# rich loads a font from the network; who reads docs need not.
FORMAT: Final = re.sub(r"@font-face \{\{.*?\}\}\n|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)

REFUSED: Final = Refused(
    number=1,
    at_s=NOW,
    what="container refused",
    code="gpu-busy",
    reason="asked for 8, and 4 are free: wait until others are done, or ask for fewer.",
    namespace="ml",
    pod="sweep",
    container="main",
)


def status_watch() -> Page:
    """Jobs on three of eight GPUs; one GPU has broken just now, a job has gone, and one was refused."""
    alone = [make.entry(at, to=make.container(of=f"train-{at}"), since=CLOCK - 7500 * at) for at in (1, 2)]
    shared = [_shared(3, "notebook-a", 3700), _shared(3, "notebook-b", 42)]
    gone = make.entry(5, to=make.container(of="eval"), since=CLOCK - 300)
    before, after = (_node([*alone, *shared, *more], broken=broken) for more, broken in (((gone,), False), ((), True)))
    answers, times = iter([before, after]), iter([NOW - 1, NOW])

    def ask() -> Asked:
        status = next(answers)
        return to_builtins(status), status

    seen = moments(ask, clock=lambda: next(times), sleep=lambda _: None)
    next(seen)
    return [*live_page(next(seen)), Line(""), Line(KEYS_LINE, Tone.FAINT)]


def _shared(index: int, name: str, age_s: float) -> Entry:
    return make.entry(index, to=make.container(of=name), mode=Mode.SHARED, since=CLOCK - age_s)


def _node(entries: list[Entry], *, broken: bool) -> DaemonStatus:
    node = make.node([make.gpu(index) for index in range(8)], driver_version="580.95.05")
    happened, notes = list[Happened](), dict[str, HealthNotes]()
    if broken:
        now, notes = after_xid(79, make.uuid(6), node.inventory, Moment(CLOCK, NOW))
        happened = [Happened.at(NOW, each, number) for number, each in enumerate(changes(node.inventory, now), 1)]
        node = replace(node, inventory=now)
    counts = {str(each.kind): 1 for each in happened}
    history = History(NOW - 9000, len(happened), counts, tuple(happened))
    refusals = (REFUSED,) if broken else ()
    return status_of(view(make.ledger(*entries), node, history=history, refusals=refusals, notes=notes))


def doctor() -> Page:
    """A node whose driver was loaded again, without a guard."""
    with tempfile.TemporaryDirectory(prefix="ng-") as folder, ExitStack() as sockets:
        node = DoctorNode(host_below(Path(folder)), sockets)
        old_uvm(node)
        node.remove("run/nri-gpu-guard/guard.json")
        found = paragraphs(replace(node.examine(), node=NamedNode("node1")), COLUMNS)
        return [Line(text.replace(folder, ""), TONES[level]) for text, level in found]


def status_observed() -> Page:
    """Five GPUs that others gave, and a container that has one open which nobody gave it."""
    return status_page(observed_node(), Times(NOW), glance=True)


COLUMNS: Final = 100
PICTURES: Final[Mapping[str, tuple[str, Callable[[], Page]]]] = {
    "status-watch.svg": ("nri-gpu status --watch", status_watch),
    "status-observed.svg": ("nri-gpu status", status_observed),
    "doctor.svg": ("nri-gpu doctor", doctor),
}


def drawn(name: str) -> str:
    """The picture of that name."""
    title, page = PICTURES[name]
    return exported(name, title, lambda console: terminal.show(page(), console))


def exported(name: str, title: str, show: Callable[[Console], None], code_format: str = FORMAT) -> str:
    """What is shown on a terminal, as a picture."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    show(console)
    return console.export_svg(title=title, code_format=code_format, unique_id=name.partition(".")[0])


def words(picture: str) -> list[str]:
    """What one can read in a picture; how rich draws it changes with its versions."""
    return re.sub(r"<[^>]*>", " ", picture.partition("</style>")[2]).replace("&#160;", " ").split()


def main() -> int:
    """Write them. Returns an exit code."""
    FOLDER.mkdir(exist_ok=True)
    for name in PICTURES:
        (FOLDER / name).write_text(drawn(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
