"""`nri-gpu run`: the daemon, with the policy, the state folder and the key without which it cannot start."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.daemon import logs
from nri_gpu.daemon.app import Daemon
from nri_gpu.domain.errors import CommandError, Exit, PolicyError, fault_of
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.kubelet.kubelet_controller import set_up_grpc
from nri_gpu.policy.document import options_in
from nri_gpu.policy.plugin_settings import PluginSettings
from nri_gpu.records.policy_file import DEFAULT_PATH, PolicyFile, PolicyMemory, load_policy, unit_folder
from nri_gpu.records.state_folder import StateError, StateFolder
from nri_gpu.system.liveness import LivenessFile
from nri_gpu.system.service_manager import Notifier
from nri_gpu.system.succession import LOOK_S, Succession

# The options of a simulation that joins no runtime: what lies outside its state folder is the node's own daemon's.
ALONE: Final[Mapping[str, str | bool]] = {
    "kubelet.enabled": False,
    "kubelet.podresources": "",
    "dra.enabled": False,
    "mps.enabled": False,
    "stray.enabled": False,
    "labels.file": "",
    "metrics.listen": "",
    "audit.dir": "",
}
GC_THRESHOLD: Final = 10_000  # new objects before a collection, instead of 700
KEY_LOST: Final = "new signing key: grants signed with the old one are not valid any more"
WATCHDOG_EVERY: Final = 50  # looks at whether the state folder is free


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Return an exit code."""
    launched = os.environ.get("NRI_PLUGIN_SOCKET", "")
    logs.set_up(args.log_level, journal=bool(launched))
    joins = not args.gpus or bool(launched or args.socket) or _names_socket(args.policy)
    bound = logger.bind(path=args.gpus)
    if not joins:
        bound.bind(fix="add --socket PATH to join one").info("SIMULATED node, which joins no runtime")
    elif args.gpus:
        bound.info("SIMULATED node")
    if joins or args.state_dir:
        return _serve(args, Path(args.state_dir or DEFAULT_STATE), launched, joins=joins)
    from tempfile import TemporaryDirectory  # brings others, and a real node does without them

    with TemporaryDirectory(prefix="nri-gpu-") as made:
        print(f"this simulation's state folder, until it ends: nri-gpu status --state-dir {made}", flush=True)
        return _serve(args, Path(made), launched, joins=joins)


def _names_socket(file: str | None) -> bool:
    """Return whether this policy file says which runtime to join. The default file is the node's own daemon's.

    The shipped file has every key with its default, which says nothing.
    """
    try:
        return bool(file) and load_policy(file).plugin.socket != PluginSettings().socket
    except PolicyError:  # which the daemon reports
        return False


def _options(args: argparse.Namespace, *, joins: bool) -> dict[str, str | bool]:
    """Return the command line's options. Raises: CommandError: it asks for a part that nothing serves alone."""
    given = options_in(vars(args))
    if not joins and (asked := [key for key in ("kubelet", "dra") if given.get(f"{key}.enabled")]):
        sentence = f"--{asked[0]} with --gpus needs --socket: a simulation without it joins no runtime"
        raise CommandError(Exit.USAGE, sentence)
    return given if joins else {**ALONE, **given}


def _serve(args: argparse.Namespace, state_dir: Path, launched: str, *, joins: bool) -> int:
    """Serve with this state folder. joins: a runtime. Return an exit code."""
    state = StateFolder(state_dir)
    succession = Succession(state.path)
    try:
        inherited = _inherited(launched) if launched else None
    except (ValueError, OSError) as error:
        sentence = f"NRI_PLUGIN_SOCKET={launched} names no connected socket: {fault_of(error)}"
        raise CommandError(Exit.USAGE, sentence) from None
    try:
        options = _options(args, joins=joins)
        policy_file = PolicyFile(args.policy, options, state.path, PolicyMemory(unit_folder()))
        liveness = LivenessFile(Path(args.run_dir) if args.run_dir else None)
        _open(state, succession if args.stand_by else None, liveness, kubelet=args.kubelet is not False)
        key = state.key()
    except StateError as error:
        cause = Exit.PERMISSION if isinstance(error.__cause__, PermissionError) else Exit.CONFIGURATION
        raise CommandError(Exit.UNAVAILABLE if error.taken else cause, error) from None
    if state.key_fault:
        logger.bind(path=str(state.path / "key"), fault=state.key_fault).warning(KEY_LOST)
    topology = Path(args.gpus) if args.gpus else None
    daemon = Daemon(state, key, policy_file, topology, succession, liveness, joins_runtime=joins)
    if args.watch_policy:
        daemon.watch_policy(Path(args.policy or DEFAULT_PATH))
    # Our values have no cycles, and looking for cycles took a third of a Synchronize of 5,000 containers.
    gc.set_threshold(GC_THRESHOLD)
    try:
        return asyncio.run(daemon.run(inherited))
    finally:
        daemon.close()
        state.close()


def _open(state: StateFolder, succession: Succession | None, liveness: LivenessFile, *, kubelet: bool) -> None:
    """Open the state folder. succession: wait for the daemon that has it. kubelet: a device plugin may be wanted.

    Raises: StateError.
    """
    try:
        state.open()
    except StateError as error:
        if not (error.taken and succession and succession.announce()):
            raise
    else:
        return
    logger.bind(path=str(state.path)).info("standing by until the running daemon leaves the state folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.OK))  # as PID 1 of a pod it would otherwise be ignored
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the policy is read when we take over
    if kubelet:
        set_up_grpc()
        with suppress(ImportError):  # now, while there is time
            import nri_gpu.kubelet.registered_socket  # noqa: F401
    notifier = Notifier()
    notifier.ready("standing by")
    for look in count():
        try:
            state.open()
        except StateError as error:
            if not error.taken:
                raise
        else:
            break
        if not look % WATCHDOG_EVERY:
            notifier.alive()
            liveness.write(ready=True)  # the next pod has to be ready before the running one is told to stop
        time.sleep(LOOK_S)
    notifier.close()


def _inherited(number: str) -> int:
    """Return the descriptor of the connection that the runtime started us with. Raises: ValueError, OSError."""
    connection = socket.socket(fileno=int(number))  # fails if it is no socket
    connection.set_inheritable(False)
    return connection.detach()
