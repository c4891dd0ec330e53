"""`nri-gpu cordon`: root takes a GPU out of use; whatever has it keeps it."""

from __future__ import annotations

import argparse
import os

from msgspec import convert

from nri_gpu.cli.ask_daemon import answer_of, answering
from nri_gpu.cordon.cordon_controller import BAD_TEXT, BY_MAX, NO_GPU, command, is_bad_text
from nri_gpu.daemon.answers import CordonAnswer
from nri_gpu.domain.errors import CommandError, Exit


def run(args: argparse.Namespace) -> int:
    """Tell the daemon. Return 1 if nothing changed, 69 if the daemon cannot be asked, 77 without permission."""
    if is_bad_text(args.why):
        raise CommandError(Exit.USAGE, f"--why: {BAD_TEXT}")
    words = command(gpu_of(args), args.why, who(), until_reset=args.until_reset)
    answer = tell(args, f"cordon {words}")
    until = "its reset is proven, or `nri-gpu uncordon`" if args.until_reset else f"nri-gpu uncordon {answer.gpu_uuid}"
    print(f"{answer.gpu_uuid} is out of use: nothing new is granted it, until {until}")
    if answer.holders:
        print(f"it stays with what has it: {', '.join(answer.holders)}")
    return Exit.OK


def tell(args: argparse.Namespace, line: str) -> CordonAnswer:
    """Return the daemon's answer to the command. Raises: CommandError, also if nothing changed."""
    answer = answer_of(answering(args.state_dir), line, lambda found: convert(found, CordonAnswer))
    if answer.fault:
        raise CommandError(Exit.FINDING, f"{answer.gpu_uuid}: {answer.fault}" if answer.gpu_uuid else answer.fault)
    return answer


def who() -> str:
    """Return who is root here, as far as sudo says."""
    name = os.environ.get("SUDO_USER", "")
    return "root" if " " in name or is_bad_text(name, BY_MAX) else name


def gpu_of(args: argparse.Namespace) -> str:
    """Return the GPU's name. Raises: CommandError: no GPU has such a name."""
    word: str = args.gpu
    if is_bad_text(word, BY_MAX) or " " in word:
        raise CommandError(Exit.FINDING, f"{word!r} is no GPU: {NO_GPU}")
    return word
