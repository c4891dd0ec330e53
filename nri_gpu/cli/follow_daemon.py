"""The node, the policy and the options of the running daemon, for verbs that show what it does or would do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from nri_gpu.cli.ask_daemon import daemon_status, overrides_of
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import DEFAULT_PATH, build_policy, load_last_good, read_policy
from nri_gpu.system.storage import below, is_there


def topology_of(status: DaemonStatus | None) -> str | None:
    """Return the topology file of the node that the running daemon simulates; None: this machine, or none runs."""
    topology = status.options.get("topology") if status else None
    return str(topology) if topology else None


def follow(args: argparse.Namespace) -> DaemonStatus | None:
    """Return the status of the daemon that a verb follows, and have its topology file where `--gpus` names none.

    With --gpus, follow only a daemon whose state folder is named: the node of a file has no other.
    """
    if args.gpus and not args.state_dir:
        return None
    status = daemon_status(Path(args.state_dir or DEFAULT_STATE))
    args.gpus = args.gpus or topology_of(status)
    return status


def followed_policy(args: argparse.Namespace, status: DaemonStatus | None, *, all_options: bool = False) -> Policy:
    """Return the policy of a verb that follows a daemon, with the options that are given over it.

    all_options: as `build_policy` takes it, where no daemon runs. Raises: PolicyError.
    """
    given = {"driver.root": args.driver_root} if args.driver_root else {}
    state_dir = Path(args.state_dir or DEFAULT_STATE)
    policy = policy_in_force(status, args.policy, state_dir, given, all_options=all_options or status is not None)
    driver = policy.driver
    if given or not driver.host_root or Path(driver.root).is_dir():
        return policy
    return replace(policy, driver=replace(driver, root=driver.host_root))  # the other is a mount in the daemon's pod


def policy_in_force(
    status: DaemonStatus | None,
    named: str | None,
    state_dir: Path,
    given: Mapping[str, object] = {},
    root: Path = Path("/"),
    *,
    default: str | None = None,
    all_options: bool,
    in_force: bool = False,
) -> Policy:
    """Return the policy of the named file, or else of the running daemon's, which may be in a pod. Raises: PolicyError.

    given: options over the daemon's. root: the folder that is the node's `/`. default: the file of a daemon that names
    none; None: the usual one. all_options: as `build_policy` takes it. in_force: whether a policy was.
    """
    options = {**overrides_of(status), **given}
    source = status.policy.source if status else ""
    path = named or below(root, source if source.startswith("/") else default or DEFAULT_PATH)
    if named or is_there(Path(path)) or (in_force and status is None):
        return build_policy(read_policy(path, in_force=in_force and not named), options, all_options=all_options)
    kept = load_last_good(state_dir, options) if source.startswith("/") and os.access(state_dir, os.X_OK) else None
    return kept or build_policy(None, options)
