"""The state of the connection to the runtime, as `status` tells it."""

from __future__ import annotations

import time

from msgspec.structs import replace

from nri_gpu.daemon.answers import RuntimeConnection, SynchronizeStatus
from nri_gpu.nri.convert import Configured
from nri_gpu.plugin.supervisor import SessionFacts


class ConnectionReport:
    """The state of a daemon's connection, as the daemon notes each of its changes."""

    def __init__(self) -> None:
        self._connection = RuntimeConnection(ready=False, since_s=time.time())

    def configured(self, configured: Configured) -> None:
        self._connection = replace(
            self._connection,
            name=configured.runtime,
            version=configured.version,
            nri_version=configured.nri_version,
        )

    def ready(self) -> None:
        self._connection = replace(self._connection, ready=True, since_s=time.time(), fault="")

    def alone(self) -> None:
        """Note that this daemon joins no runtime, and is ready without it."""
        self._connection = replace(self._connection, ready=True, joined=False)

    def away(self, why: str) -> None:
        """Note that the runtime is not connected. why: the sentence."""
        since_s = time.time() if self._connection.ready else self._connection.since_s
        self._connection = replace(self._connection, ready=False, since_s=since_s, fault=why)

    def connection(self, facts: SessionFacts, list_fault: str, cri_fault: str, second: str = "") -> RuntimeConnection:
        """Return the connection as it is now.

        list_fault: why the runtime could not list the node's containers to us again, or empty. cri_fault: why its CRI
        cannot be asked, or empty. second: what proves that another nri-gpu serves it, or empty.
        """
        seen, epoch_s = facts.synchronize, time.time() - time.monotonic()
        return replace(
            self._connection,
            list_fault=list_fault,
            cri_fault=cri_fault,
            second=second,
            answered_s=facts.answered and facts.answered + epoch_s,
            synchronize=seen
            and SynchronizeStatus(
                at_s=seen.began + epoch_s,
                duration_s=seen.took_s,
                parts=seen.parts,
                size_bytes=seen.size_bytes,
                objects=seen.objects,
                whole=seen.whole,
            ),
        )
