"""ttrpc's envelopes, between events and protobuf bytes; the one reader of `ttrpc_pb2`.

Source: containerd/ttrpc request.proto, channel.go.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from nri_gpu._pb import ttrpc_pb2
from nri_gpu.domain.errors import LocalProtocolError, RemoteProtocolError
from nri_gpu.ttrpc.events import RequestReceived, RequestSent, ResponseReceived, StreamId
from nri_gpu.ttrpc.status import OK, Status

# An empty pair is two bytes on the wire and a hundred in memory; callers send a handful (containerd one, tracing two).
METADATA_MAX: Final = 1024  # pairs


def encode_request(request: RequestSent) -> bytes:
    """A Request. Raises LocalProtocolError for text that is not Unicode and values of a wrong type."""
    try:
        return ttrpc_pb2.Request(
            service=request.service,
            method=request.method,
            payload=request.payload,
            timeout_nano=request.timeout_ns,
            metadata=[ttrpc_pb2.KeyValue(key=key, value=value) for key, value in request.metadata],
        ).SerializeToString()
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"request cannot be encoded: {error}") from error


def encode_response(status: Status, payload: bytes) -> bytes:
    """A Response, empty for an empty success. Raises LocalProtocolError for a payload that is not bytes."""
    try:
        if status.ok:
            return ttrpc_pb2.Response(payload=payload).SerializeToString()
        # Text from the file system may hold what UTF-8 cannot. The refusal must arrive: silence starts the container.
        message = status.message.encode("utf-8", "backslashreplace").decode()
        wire_status = ttrpc_pb2.Status(code=status.code, message=message)
        return ttrpc_pb2.Response(status=wire_status).SerializeToString()
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"response cannot be encoded: {error}") from error


def decode_request(stream_id: StreamId, data: bytes) -> RequestReceived:
    """A Request. Raises RemoteProtocolError for bytes that are not one, and for more pairs than METADATA_MAX."""
    try:
        request = ttrpc_pb2.Request.FromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a ttrpc request: {error}") from error
    pairs = request.metadata
    if len(pairs) > METADATA_MAX:
        raise RemoteProtocolError(f"{len(pairs)} pairs of metadata are over the limit of {METADATA_MAX}")
    metadata = tuple((pair.key, pair.value) for pair in pairs) if pairs else ()
    return RequestReceived(stream_id, request.service, request.method, request.payload, request.timeout_nano, metadata)


def decode_response(stream_id: StreamId, data: bytes) -> ResponseReceived:
    """A Response; zero bytes are an empty success. Raises RemoteProtocolError for bytes that are not one."""
    try:
        response = ttrpc_pb2.Response.FromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a ttrpc response: {error}") from error
    status = Status.from_wire(response.status.code, response.status.message) if response.HasField("status") else OK
    return ResponseReceived(stream_id, status, response.payload)
