"""Frames over a socket: four bytes of length, then one msgpack message."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from corogen.wire.messages import FromWorker, ToWorker

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """`message` with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class BlockingChannel:
    """The worker's end: one thread receives, another may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        """Send one message; blocks until the kernel has taken it."""
        self._sock.sendall(encode_frame(message))

    def receive(self) -> ToWorker | None:
        """The next message, or None when the other end is gone."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        body = self._read(_LENGTH.unpack(head)[0])
        return None if body is None else self._decoder.decode(body)

    def _read(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            try:
                size = self._sock.recv_into(view[got:])
            except ConnectionError:
                return None
            if not size:
                return None
            got += size
        return data


class ChannelProtocol(asyncio.Protocol):
    """The engine's end: `on_message` for each message, `on_lost` once when the worker is gone."""

    def __init__(self, on_message: Callable[[FromWorker], None], on_lost: Callable[[], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio calls this with the transport that `send` writes to."""
        if isinstance(transport, asyncio.WriteTransport) or hasattr(transport, "write"):
            self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Cut the byte stream into frames."""
        buffer = self._buffer
        buffer += data
        start, size = 0, _LENGTH.size
        while len(buffer) - start >= size:
            end = start + size + _LENGTH.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            message = self._decoder.decode(bytes(buffer[start + size : end]))
            start = end
            self._on_message(message)
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """The worker closed its end or died."""
        self._transport = None
        self._on_lost()

    def send(self, message: ToWorker) -> None:
        """Queue one message. Does nothing once the worker is gone: `on_lost` tells."""
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None:
            self._transport.close()
