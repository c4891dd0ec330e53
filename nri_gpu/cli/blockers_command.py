"""`nri-gpu blockers`: who keeps the driver loaded or a GPU in use, and what ends each. No daemon is asked."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from nri_gpu.blockers.blocker import Blocker, BlockersReport, NodeGpu
from nri_gpu.blockers.driver_users import blockers
from nri_gpu.blockers.node_users import look_at_users, unload_commands
from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.render import answer, lines
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.gpu import gpu_names
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.domain.text import counted, listed, shown
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.host.modules import PROC, module_version
from nri_gpu.plugin.guard_status import in_pod
from nri_gpu.system.node_name import this_node
from nri_gpu.system.storage import below

FROM_A_POD: Final = "containers: the chart's pods do not mount their bundles: run it on the node, or with --root"


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 1 if something keeps the driver loaded, 69 or 77 if something could not be seen."""
    report = asyncio.run(_look(args))
    answer(args, report, blockers_page(report))
    return code_of(report)


def code_of(report: BlockersReport) -> Exit:
    """Return the exit code: what keeps the driver loaded counts more than what could not be seen."""
    if report.keeps_loaded:
        return Exit.FINDING
    if report.unseen:
        return Exit.PERMISSION if report.denied else Exit.UNAVAILABLE
    return Exit.OK


async def _look(args: argparse.Namespace) -> BlockersReport:
    root = Path(args.root or "/")
    places = {name: below(root, f"/{name}") for name in ("proc", "sys", "dev")}
    states = [Path(args.containerd_state)] if args.containerd_state else []
    seen = await look_at_users(HostFolders(**places, host=root), below(root, DEFAULT_STATE), states)
    gpu = gpu_named(args.gpu, seen.users.gpus) if args.gpu else None
    keeping, breaking = blockers(seen.users, gpu)
    missing = [FROM_A_POD] if in_pod() and not args.root else []
    return BlockersReport(
        node=this_node(),
        driver_version=module_version(places["sys"], below(root, PROC)),
        gpu=gpu,
        keeps_loaded=keeping,
        will_break=breaking,
        unload=() if gpu else unload_commands(seen.users.modules),
        unseen=(*seen.unseen, *missing),
        denied=seen.denied,
    )


def gpu_named(word: str, gpus: Iterable[NodeGpu]) -> NodeGpu:
    """Return the GPU with that index, UUID or PCI address. Raises: CommandError."""
    names, every = gpu_names(word), tuple(gpus)
    found = next((gpu for gpu in every if not names.isdisjoint({str(gpu.index), gpu.uuid, gpu.pci_bus_id})), None)
    if found is None:
        known = listed((f"{gpu.index} ({gpu.pci_bus_id})" for gpu in every), 16) or "none"
        sentence = f"this node has no GPU {shown(word)}: name it by index, UUID or PCI address; the driver has {known}"
        raise CommandError(Exit.USAGE, sentence)
    return found


def blockers_page(report: BlockersReport) -> list[Line]:
    """Return both lists, each user with the lines that end it."""
    keeping, breaking = report.keeps_loaded, report.will_break
    what = (
        f"GPU {report.gpu.index} ({report.gpu.pci_bus_id})" if report.gpu else f"driver {report.driver_version}".strip()
    )
    state = "is kept in use" if report.gpu else "is kept loaded"
    if not report.driver_version and not keeping:
        headline = "the NVIDIA driver is not loaded"
    elif keeping:
        headline = f"{what} {state} by {len(keeping)}: end them in this order"
    else:
        headline = (
            f"nothing{' that could be seen' * bool(report.unseen)} keeps {what} {'in use' if report.gpu else 'loaded'}"
        )
    page = [Line(f"{report.node.name}: {headline}", Tone.HEAD), *_listed(keeping, Tone.BAD)]
    if report.unload and report.driver_version:
        page += [Line("then" if keeping else "to unload it:"), *_commands(report.unload)]
    if breaking:
        page += [Line(f"{counted(len(breaking), 'user')} will break by its replacement:", Tone.HEAD)]
        page += _listed(breaking, Tone.WARN)
    return [*page, *lines((f"not seen: {sentence}" for sentence in report.unseen), Tone.WARN)]


def _listed(found: Iterable[Blocker], tone: Tone) -> Iterator[Line]:
    for number, each in enumerate(found, 1):
        yield Line(f"{number}. {each.kind} {each.name}: {each.what}", tone)
        yield from _commands(each.next or ("# no command is known that ends it",))


def _commands(found: Iterable[str]) -> Iterator[Line]:
    return lines((f"   {command}" for command in found), Tone.PLAIN)
