"""Bounds on request bodies: how large, how slow, and until when they may come in."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corogen.adapters.server.errors import ApiError, note_error
from corogen.adapters.server.settings import ServerSettings

_CLOSE = {"Connection": "close"}

#: seconds and bytes for which a refused body is read, in vain
_LINGER_S, _MAX_DISCARD = 10.0, 2**30


class Uploads:
    """The requests of one server whose body is on its way in. Belongs to the server's loop."""

    def __init__(self) -> None:
        self.closing = False
        self._tasks: set[asyncio.Task[object]] = set()

    def close(self) -> None:
        """Wait for none of them any longer; for the end of the server."""
        self.closing = True
        for task in self._tasks:
            task.cancel()

    async def next_part(self, receive: Receive, timeout_s: float) -> Message | None:
        """The next message, or None once `close` was called. Raises TimeoutError."""
        task = asyncio.current_task()
        if self.closing or task is None:
            return None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(timeout_s):
                return await receive()
        except asyncio.CancelledError:
            if self.closing and not task.uncancel():
                return None
            raise
        finally:
            self._tasks.discard(task)


class LimitBody:
    """Pure ASGI middleware: an error for a body that is too large (413), stalls (408) or comes at the end (503).

    The answer goes out at once. What is left of a large body is read in vain for a while: many clients read no answer
    before they have sent everything, and a connection that is closed meanwhile takes the answer with it.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, uploads: Uploads) -> None:
        self._app, self._settings, self._uploads = app, settings, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self._settings, self._uploads, receive, send)
        if _announced(scope) > self._settings.max_body_bytes:
            waits = _waits_for_leave(scope)
            error = body.too_large(headers=_CLOSE if waits else None)
            body.refused = not waits
            note_error(scope, error)
            await error.response()(scope, receive, body.send)
        else:
            await self._app(scope, body.receive, body.send)


class _Body:
    """The body of one request, and the answer."""

    def __init__(self, settings: ServerSettings, uploads: Uploads, receive: Receive, send: Send) -> None:
        self._settings, self._uploads, self._receive, self._send = settings, uploads, receive, send
        self._seen, self._complete = 0, False
        #: it was too large: what is left of it is to be read in vain
        self.refused = False

    async def receive(self) -> Message:
        """The next part, or the client's leaving. Raises ApiError."""
        if self._complete:
            return await self._receive()
        message = await self._next()
        self._seen += len(message.get("body", b""))
        self._complete = not message.get("more_body")
        if self._seen > self._settings.max_body_bytes:
            self.refused = not self._complete
            raise self.too_large()
        return message

    async def _next(self) -> Message:
        timeout_s = self._settings.body_timeout_s
        try:
            message = await self._uploads.next_part(self._receive, timeout_s)
        except TimeoutError:
            words = f"nothing more of the body came for {timeout_s:g} s"
            raise ApiError(408, words, code="request_timeout", headers=_CLOSE) from None
        if message is None:
            headers = {**_CLOSE, "Retry-After": str(self._settings.retry_after_s)}
            raise ApiError(503, "the server is closing", code="engine_closed", headers=headers)
        return message

    def too_large(self, headers: dict[str, str] | None = None) -> ApiError:
        size = self._settings.max_body_bytes / 2**20
        return ApiError(413, f"the body is larger than {size:g} MiB, the most that this server takes", headers=headers)

    async def send(self, message: Message) -> None:
        """Part of the answer. That to a refused body is whole for the client, and only then for the server."""
        if not self.refused or message["type"] != "http.response.body" or message.get("more_body"):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._discard()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self) -> None:
        while self._seen < _MAX_DISCARD:
            message = await self._uploads.next_part(self._receive, _LINGER_S)
            if message is None or not message.get("more_body"):
                return
            self._seen += len(message.get("body", b""))


def _announced(scope: Scope) -> int:
    value = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(value) if value.isdigit() and len(value) < 20 else 0


def _waits_for_leave(scope: Scope) -> bool:
    """Whether the client sends its body only after a 100 Continue."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])
