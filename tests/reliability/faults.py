"""Faults while eight containers are created at once, on each real containerd: who had which GPU is checked throughout.

The chaos test's engine creates the containers and holds what came of them against the kernel, the ledger, the signed
grants, the programs' own words and `nri-gpu verify`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.reliability import disturbances as do
from tests.reliability.disturbances import Disturbance
from tests.reliability.result import PROJECT, Fact, Found, Options, Row
from tests.support import packages
from tests.support.chaos import UNSERVED, WINDOW, ChaosRun, chaos_run
from tests.support.errors import HarnessError

CREATES: Final = 64  # on each containerd; a few more follow when all is mended
QUICK_CREATES: Final = 8
UNSERVED_TIMES: Final = 8  # as many, where most are refused at once
STAGE_MIB: Final = 4
LOGS: Final = PROJECT / "build" / "reliability"
REFUSED: Final = re.compile(r"refused \[([a-z-]+)\]")


class Fault(Struct, frozen=True):
    """One row. mount, required: see `chaos_run`. mend: what is still to be done when all are created."""

    what: str
    disturb: Disturbance
    mount: Callable[[Path], None] = lambda base: None
    mend: Callable[[ChaosRun], None] = lambda run: None
    required: bool = False


def _little_stage(base: Path) -> None:
    """The daemon's stage folder on a file system of its own, in our own mount namespace (see `__main__`)."""
    folder = base / "drivers"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STAGE_MIB}m,mode=0700", "none", folder], check=True)


FAULTS: Final[Mapping[str, Fault]] = {
    "kill-guard": Fault("guard killed by SIGKILL", do.kill_guard),
    "kill-both": Fault("daemon and guard killed by SIGKILL, one after the other", do.kill_both_in_turn),
    "starve": Fault(
        "daemon and guard dead for half of the time, the runtime's own validator on, pods that ask require nri-gpu; "
        f"then the daemon killed in the middle of {do.AIMS} creations",
        ChaosRun.starve,
        mend=do.aim,
        required=True,
    ),
    "stop-daemon": Fault("daemon stopped by SIGSTOP for longer than the runtime's 2 s, then SIGCONT", do.stop_daemon),
    "stop-guard": Fault("guard stopped in the same way", do.stop_guard),
    "full-stage": Fault(
        f"stage folder of {STAGE_MIB} MiB full when another driver is staged",
        do.fill_stage,
        mount=_little_stage,
    ),
    "read-only": Fault("state folder read-only (EROFS), daemon killed meanwhile", do.make_state_read_only),
    "policy": Fault(
        f"policy file broken in {len(do.BREAKS)} ways and mended, reloaded each time",
        do.break_policy,
        mend=do.mend_policy,
    ),
}


def found(options: Options) -> Iterator[Found]:
    """A row for each fault, of both containerds together. Raises: HarnessError: the machine cannot run them."""
    there = packages.available()
    runtimes = [packages.fetch(version) for version in (there[0], there[-1])]
    if options.quick:
        runtimes = runtimes[-1:]
    yield Fact("containerd", " and ".join(runtime.release.partition("+")[0].partition("~")[0] for runtime in runtimes))
    for name in [options.case] if options.case else QUICK if options.quick else FAULTS:
        yield _row(name, FAULTS[name], runtimes, options)


QUICK: Final = ("kill-both", "policy")


def _row(name: str, fault: Fault, runtimes: list[packages.Runtime], options: Options) -> Row:
    happened, checked, failed = Counter[str](), Counter[str](), ""
    for runtime in (each for each in runtimes if each.validates or not fault.required):
        try:
            run = _attack(name, fault, runtime, options)
        except (HarnessError, AssertionError, OSError, subprocess.SubprocessError) as error:
            failed = f"containerd {runtime.release}: {type(error).__name__}: {error}"
            break
        happened += run.tally.happened
        checked += run.tally.checked
        if run.tally.unexpected:
            failed = f"containerd {runtime.release}: {run.tally.unexpected}"
    return Row(
        what=fault.what,
        count=happened["created"] + sum(often for what, often in happened.items() if what.startswith("create refused")),
        unit="creations",
        outcome=failed or _outcome(happened, checked) + (_created_without(happened) if fault.required else ""),
        command=f"python -m tests.reliability --only faults --case {name}",
        passed=not failed,
        numbers={what.replace(" ", "_"): often for what, often in (happened + checked).items()},
    )


def _attack(name: str, fault: Fault, runtime: packages.Runtime, options: Options) -> ChaosRun:
    """Raises: HarnessError, AssertionError: what must never be has been."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nri-gpu-faults-")))
        stack.callback(
            lambda: subprocess.run(["sh", "-c", f"umount -lq {folder}/d/*"], check=False, capture_output=True)
        )
        run = stack.enter_context(chaos_run(runtime, folder, options.seed, fault.mount, required=fault.required))
        stack.callback(_keep_logs, name, run)
        creates = (QUICK_CREATES if options.quick else CREATES) * (UNSERVED_TIMES if fault.required else 1)
        run.create_while(creates, lambda _: fault.disturb(run), lambda: fault.mend(run))
        run.settle()
        run.evidence.verify()
        run.end_pods()
        run.settle()
        run.check_nothing_is_left()
        assert not (fault.required and run.tally.happened[UNSERVED]), run.tally
        return run


def _keep_logs(name: str, run: ChaosRun) -> None:
    """For whoever looks into a failure."""
    folder = LOGS / f"{name}-{run.node.runtime.number[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    for log in (run.daemon.launch.log, run.guard.launch.log, run.node.log_path):
        shutil.copy(log, folder / f"{log.parent.name}-{log.name}")


def _outcome(happened: Counter[str], checked: Counter[str]) -> str:
    """The sentence of a row in which nothing is wrong."""
    refused = Counter[str]()
    for what, often in happened.items():
        if code := REFUSED.search(what):
            refused[code[1]] += often
    disturbed = [f"{often} x {what}" for what, often in happened.items() if _is_disturbance(what)]
    codes = ", ".join(f"`{code}` {often}" for code, often in refused.most_common())
    without = checked["programs that ran without while the guard was away"]
    parts = [
        "; ".join(disturbed),
        f"{checked['programs that ran with a GPU']} programs ran with exactly what they asked for",
        f"refused: {codes}" if codes else "none refused",
        f"started without: {without}" + (" (before the guard was back)" if without else ""),
        "given twice: 0",
    ]
    return "; ".join(parts)


def _created_without(happened: Counter[str]) -> str:
    """The two counts of a row whose pods require nri-gpu."""
    return f"; {UNSERVED}: {happened[UNSERVED]}; {WINDOW}: {happened[WINDOW]}"


OF_CONTAINERS: Final = ("created", "started", "removed", "start failed", "lost with the runtime", UNSERVED, WINDOW)


def _is_disturbance(what: str) -> bool:
    return what not in OF_CONTAINERS and not REFUSED.search(what)
