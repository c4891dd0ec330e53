"""`nri-gpu repaired`: root's word to the daemon that a GPU was reset, where no driver can tell."""

from __future__ import annotations

import argparse

from msgspec import convert

from nri_gpu.cli.ask_daemon import answer_of, answering
from nri_gpu.daemon.answers import RepairedAnswer
from nri_gpu.domain.errors import CommandError, Exit


def run(args: argparse.Namespace) -> int:
    """Tell the daemon. Return 1 if no reset was due, 69 if the daemon cannot be asked, 77 without permission."""
    answer = answer_of(answering(args.state_dir), f"repaired {args.gpu}", lambda found: convert(found, RepairedAnswer))
    if not answer.gpu_uuid:
        raise CommandError(
            Exit.FINDING, f"no GPU {args.gpu}: name it by UUID, index or PCI address, see nri-gpu status"
        )
    if answer.awaited:
        print(f"{answer.gpu_uuid} is in use again: it was taken out of use until its reset")
    elif not answer.due:
        raise CommandError(Exit.FINDING, f"{answer.gpu_uuid}: no reset is due, so nothing changed")
    if answer.due:
        print(
            f"{answer.gpu_uuid} counts as reset (it was withheld because {answer.due}): it is granted after "
            f"{answer.hold_down_s} s without trouble"
        )
    return Exit.OK
