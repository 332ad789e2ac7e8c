"""Server-sent events: an answer while it is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from corogen.adapters.server.disconnect import unless_gone
from corogen.adapters.streams import AsyncStream
from corogen.outputs import Response as Piece

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


def event(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(data) + b"\n\n"


class Events(Protocol):
    """Turns pieces into events, in the shape of one API."""

    def piece(self, piece: Piece) -> bytes:
        """Events for a piece."""

    def end(self) -> bytes:
        """Events after the last piece."""


class ClosableEvents(Events, Protocol):
    """The same, told of the end."""

    def close(self) -> None:
        """The response has ended, however it did."""


class EventStream(Response):
    """The response that sends events as pieces come. The client's leaving aborts the requests at once.

    Args:
        pieces: left when the response ends, however it ends.
        first: a piece that has been read already, if one has.
        failed: turns an exception into the event that tells it.
        keep_alive_s: seconds of silence after which a comment is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncStream,
        events: ClosableEvents,
        *,
        first: Piece | None,
        failed: Callable[[Exception], Mapping[str, Any]],
        keep_alive_s: float,
    ) -> None:
        self._pieces, self._events, self._first = pieces, events, first
        self._failed, self._keep_alive_s = failed, keep_alive_s
        self._sent_at = asyncio.get_running_loop().time()
        self.status_code, self.background = 200, None
        self.body = b""
        # X-Accel-Buffering: nginx would hold events back
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ClientGone."""
        try:
            async with self._pieces:
                await unless_gone(receive, self._send_all(send))
        finally:
            self._events.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        keeper = asyncio.get_running_loop().create_task(self._keep_alive(send))
        try:
            await self._send(send, KEEP_ALIVE if self._first is None else self._events.piece(self._first))
            async for piece in self._pieces:
                await self._send(send, self._events.piece(piece))
            rest = self._events.end()
        except Exception as error:
            rest = event(self._failed(error))
        finally:
            keeper.cancel()
        await send({"type": "http.response.body", "body": rest + DONE, "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        """Beside the pieces, so that they need no timer each: wakes when a comment might be due."""
        loop = asyncio.get_running_loop()
        while True:
            due = self._sent_at + self._keep_alive_s
            await asyncio.sleep(due - loop.time())
            if self._sent_at + self._keep_alive_s <= loop.time():
                await self._send(send, KEEP_ALIVE)


async def next_piece(pieces: AsyncStream, timeout_s: float) -> Piece | None:
    """The next piece, or None after the last. Nothing is lost by a timeout.

    Raises:
        TimeoutError: none came in time.
        CorogenError: of the request.
    """
    async with asyncio.timeout(timeout_s):
        return await anext(pieces, None)
