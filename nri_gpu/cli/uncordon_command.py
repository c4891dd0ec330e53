"""`nri-gpu uncordon`: root takes a GPU back into use."""

from __future__ import annotations

import argparse

from nri_gpu.cli.cordon_command import gpu_of, tell, who
from nri_gpu.domain.errors import Exit


def run(args: argparse.Namespace) -> int:
    """Tell the daemon. Return 1 if nothing changed, 69 if the daemon cannot be asked, 77 without permission."""
    answer = tell(args, f"uncordon {gpu_of(args)} {who()}")
    print(f"{answer.gpu_uuid} is in use again")
    if answer.withheld:
        print(f"it is granted to nobody yet all the same: {answer.withheld}")
    return Exit.OK
