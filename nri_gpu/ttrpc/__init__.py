"""ttrpc and NRI's mux without I/O: a library in its own right, described in docs/ttrpc.md. This is all of its API."""

from nri_gpu.domain.errors import LocalProtocolError, OversizeError, RemoteProtocolError
from nri_gpu.ttrpc.connection import Connection, Role
from nri_gpu.ttrpc.events import (
    NEED_DATA,
    OK,
    BytesLike,
    ConnectionClosed,
    Incoming,
    Metadata,
    NeedData,
    Outgoing,
    RequestReceived,
    RequestRejected,
    RequestSent,
    ResponseReceived,
    ResponseSent,
    Status,
    StatusCode,
    StreamId,
)
from nri_gpu.ttrpc.frame import RECEIVE_MAX, SEND_MAX, SendOversizeError
from nri_gpu.ttrpc.mux import PLUGIN_SERVICE, RUNTIME_SERVICE, ConnId, Mux, MuxEvent

__all__ = [
    "NEED_DATA",
    "OK",
    "PLUGIN_SERVICE",
    "RECEIVE_MAX",
    "RUNTIME_SERVICE",
    "SEND_MAX",
    "BytesLike",
    "ConnId",
    "Connection",
    "ConnectionClosed",
    "Incoming",
    "LocalProtocolError",
    "Metadata",
    "Mux",
    "MuxEvent",
    "NeedData",
    "Outgoing",
    "OversizeError",
    "RemoteProtocolError",
    "RequestReceived",
    "RequestRejected",
    "RequestSent",
    "ResponseReceived",
    "ResponseSent",
    "Role",
    "SendOversizeError",
    "Status",
    "StatusCode",
    "StreamId",
]
