"""`nri-gpu observe`: see observe/observe_process.py."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.daemon import logs
from nri_gpu.domain.errors import CommandError, Exit, PolicyError
from nri_gpu.domain.names import DEFAULT_OBSERVE, DEFAULT_STATE
from nri_gpu.observe.observe_policy import ObservePolicy
from nri_gpu.observe.observe_process import ObserveProcess, RunFolderError, confine, lock_folder
from nri_gpu.observe.senses import senses_of
from nri_gpu.plugin.guard_status import in_pod
from nri_gpu.policy.document import options_in
from nri_gpu.records.policy_file import DEFAULT_PATH

PODRESOURCES: Final = "kubelet.podresources"


def run(args: argparse.Namespace) -> int:
    """Observe until a signal. Return an exit code."""
    logs.set_up(args.log_level)
    run_dir, file = Path(args.run_dir or DEFAULT_OBSERVE), Path(args.policy) if args.policy else None
    try:
        policy = ObservePolicy(file, {**options_in(vars(args)), PODRESOURCES: args.pod_resources})
    except PolicyError as error:
        fault = error.faults[0]
        raise CommandError(
            Exit.USAGE, f"{fault.key.replace(PODRESOURCES, '--pod-resources')}: {fault.message}"
        ) from None
    try:
        lock = lock_folder(run_dir)
    except RunFolderError as error:
        raise CommandError(error.code, error) from None
    may_open = confine()
    policy.read()
    if args.gpus:
        logger.bind(path=args.gpus).info("SIMULATED node")
    process = ObserveProcess(
        policy,
        run_dir,
        senses_of(policy.policy.kubelet.podresources, [args.containerd_state] if args.containerd_state else []),
        topology=Path(args.gpus) if args.gpus else None,
        state_dir=Path(args.state_dir or DEFAULT_STATE),
        may_open=may_open,
        stays=is_service(),
    )
    if args.watch_policy:
        process.watch_policy(file or DEFAULT_PATH)
    gc.collect()
    gc.freeze()
    try:
        return asyncio.run(process.run())
    finally:
        os.close(lock)


def is_service() -> bool:
    """Return whether something started this process that keeps it running: a service manager, or a pod's runtime."""
    if in_pod() or "NOTIFY_SOCKET" in os.environ:
        return True
    return "INVOCATION_ID" in os.environ and not sys.stdin.isatty()  # a desktop's terminals have it, too
