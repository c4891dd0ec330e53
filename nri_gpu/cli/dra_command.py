"""`nri-gpu dra`: see dra/driver_process.py."""

from __future__ import annotations

import argparse
import asyncio
import gc
from pathlib import Path

from nri_gpu.daemon import logs
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.domain.names import DEFAULT_STATE
from nri_gpu.kubelet.kubelet_controller import set_up_grpc
from nri_gpu.system.liveness import LivenessFile
from nri_gpu.system.node_name import node_name


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Return an exit code."""
    logs.set_up(args.log_level)
    set_up_grpc()
    from nri_gpu.dra.api_access import AccessError, by_kubeconfig, in_cluster
    from nri_gpu.dra.api_server import ApiServer
    from nri_gpu.dra.daemon_client import DaemonClient
    from nri_gpu.dra.device_health import DeviceHealthService
    from nri_gpu.dra.driver_process import DriverProcess
    from nri_gpu.dra.node_events import NodeEvents
    from nri_gpu.dra.publisher import Publisher

    try:
        access = by_kubeconfig(Path(args.kubeconfig)) if args.kubeconfig else in_cluster()
    except AccessError as error:
        raise CommandError(Exit.PERMISSION if error.denied else Exit.CONFIGURATION, error) from None
    node = args.node_name or node_name()
    api_server = ApiServer(access)
    daemon = DaemonClient(Path(args.state_dir or DEFAULT_STATE))
    liveness = LivenessFile(Path(args.run_dir) if args.run_dir else None)
    process = DriverProcess(
        daemon,
        api_server,
        Publisher(api_server, node),
        DeviceHealthService(node),
        NodeEvents(api_server, node),
        liveness=liveness,
    )
    gc.collect()
    gc.freeze()
    try:
        return asyncio.run(process.run())
    finally:
        api_server.close()
