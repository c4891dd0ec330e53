"""From a request to its answer: method table, deadline, and one place where every failure becomes a status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.errors import RemoteProtocolError, TooManyEntriesError
from nri_gpu.log import logger
from nri_gpu.nri import status
from nri_gpu.nri.convert import DecodeError
from nri_gpu.wire.events import RequestReceived, ResponseSent
from nri_gpu.wire.status import Status

Handler = Callable[[bytes], bytes | Status]
# Our deadline lies this much inside the runtime's: an answer that comes too late is worse than a refusal, because the
# runtime then drops us and starts the container without its GPUs.
MARGIN_NS: Final = 100_000_000


class Dispatcher(Struct):
    """Answers requests of one service.

    table: method -> handler. Handlers are plain functions on values in memory: they cannot hang, so the deadline is
    looked at before one runs, never during.
    request_timeout_ns: what Configure told; holds for a request that names no time of its own. 0: none.
    """

    service: str
    table: Mapping[str, Handler]
    request_timeout_ns: int = 0

    def answer(self, request: RequestReceived, waited_ns: int = 0) -> ResponseSent:
        """Answer one request. waited_ns: how long ago its bytes were read. Never raises."""
        outcome = self._outcome(request, waited_ns)
        if isinstance(outcome, Status):
            return ResponseSent(request.stream_id, status=outcome)
        return ResponseSent(request.stream_id, outcome)

    def _outcome(self, request: RequestReceived, waited_ns: int) -> bytes | Status:
        handler = self.table.get(request.method) if request.service == self.service else None
        if handler is None:
            return status.unknown_method(request.service, request.method, self.service)
        if _late(request.timeout_ns or self.request_timeout_ns, waited_ns):
            return self._failed(request, status.LATE)
        try:
            return handler(request.payload)
        except DecodeError:
            return self._failed(request, status.MALFORMED)
        except TooManyEntriesError as error:
            return self._failed(request, status.status_of(Reason(Code.REQUEST_TOO_LARGE, str(error))))
        except RemoteProtocolError as error:
            return self._failed(request, status.out_of_order(str(error)))
        except Exception:  # the one net under every handler: silence would start containers without us
            bound = logger.bind(method=request.method, stream_id=request.stream_id)
            bound.opt(exception=True).error("bug in a handler")
            return status.INTERNAL

    def _failed(self, request: RequestReceived, outcome: Status) -> Status:
        bound = logger.bind(method=request.method, stream_id=request.stream_id)
        bound.bind(deadline_ms=request.timeout_ns / 1e6, reason=outcome.message).warning("request failed")
        return outcome


def _late(timeout_ns: int, waited_ns: int) -> bool:
    """timeout_ns: 0 is none, negative is already over (ttrpc: server.go)."""
    return timeout_ns < 0 or (timeout_ns > 0 and waited_ns > max(timeout_ns - MARGIN_NS, timeout_ns // 2))
