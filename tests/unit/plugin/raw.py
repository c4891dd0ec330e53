"""Bytes of the wire, right or wrong."""

from __future__ import annotations


def mux(conn_id: int, payload: bytes, length: int | None = None) -> bytes:
    return conn_id.to_bytes(4, "big") + (len(payload) if length is None else length).to_bytes(4, "big") + payload


def frame(length: int, stream_id: int, kind: int, data: bytes = b"") -> bytes:
    return length.to_bytes(4, "big") + stream_id.to_bytes(4, "big") + bytes((kind, 0)) + data


def cut_off(length: int) -> bytes:
    """A message of that length as NRI 0.6 writes it: the first 4 KiB, when its mux refuses the whole."""
    return mux(1, (frame(length, 1001, 1) + b"\0" * 4096)[:4096])
