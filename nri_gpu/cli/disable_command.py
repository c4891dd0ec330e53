"""`nri-gpu disable`: what `enable` installed for a feature goes again."""

from __future__ import annotations

import argparse
from contextlib import suppress

from nri_gpu.cli.enable_command import policy_of, print_changes, require_root
from nri_gpu.cli.page import Line, Tone
from nri_gpu.domain.errors import Exit, PolicyError
from nri_gpu.enable.enabling import EnableOptions, disable
from nri_gpu.enable.features import FEATURES


def run(args: argparse.Namespace) -> int:
    """Disable the feature, or print how. Return 69 or 77 if it cannot be."""
    require_root(args)
    done = disable(args.feature, EnableOptions(dry_run=args.dry_run, now=args.now))
    notes = [Line(f"{path} stays: `nri-gpu enable` did not make it as it is", Tone.WARN) for path in done.plan.foreign]
    feature = FEATURES[args.feature]
    with suppress(PolicyError):  # it may be broken: the files go all the same
        if feature.setting and feature.is_set(policy_of(args)):
            notes.append(Line(f"advice: the policy still has {feature.setting}: remove it, and see: nri-gpu check"))
    print_changes(args, done, notes, stopped=() if args.now else done.plan.disabled)
    return Exit.OK
