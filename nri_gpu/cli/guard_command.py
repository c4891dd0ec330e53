"""`nri-gpu guard`: see plugin/guard_process.py."""

from __future__ import annotations

import argparse
import asyncio
import gc
from pathlib import Path

from nri_gpu.daemon import logs
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.plugin.guard_process import GuardProcess, guard_settings
from nri_gpu.plugin.guard_state import DaemonState
from nri_gpu.plugin.guard_status import DEFAULT_RUN_DIR
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import override


def run(args: argparse.Namespace) -> int:
    """Guard until a signal. Return an exit code."""
    logs.set_up(args.log_level)
    options = {"plugin.socket": args.socket} if args.socket else {}
    fallback = override(Policy.default(), options)
    state_dir, path = Path(args.state_dir or DEFAULT_STATE), Path(args.policy) if args.policy else None
    settings = guard_settings(state_dir, path, options) or fallback
    process = GuardProcess(settings, DaemonState(state_dir, path), Path(args.run_dir or DEFAULT_RUN_DIR))
    gc.collect()
    gc.freeze()
    return asyncio.run(process.run())
