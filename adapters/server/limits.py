"""A bound on request bodies, whether or not their length is announced."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corogen.adapters.server.errors import ApiError, note_error

#: a body that was refused may not have been read to its end
_CLOSE = {"Connection": "close"}

#: bytes of a refused body that are read, in vain
_MAX_DISCARD = 2**30


class LimitBody:
    """Pure ASGI middleware: 413 for a body above `max_bytes`, announced or sent in chunks."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _announced(scope) > self._max_bytes:
            if not _waits_for_leave(scope):
                await discard(receive)
            error = ApiError(413, self._words, headers=_CLOSE)
            note_error(scope, error)
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        seen = 0

        async def count() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                if message.get("more_body"):
                    await discard(receive)
                raise HTTPException(413, self._words, headers=_CLOSE)
            return message

        return count

    @property
    def _words(self) -> str:
        return f"the body is larger than {self._max_bytes / 2**20:g} MiB, the most that this server takes"


def _announced(scope: Scope) -> int:
    value = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(value) if value.isdigit() else 0


def _waits_for_leave(scope: Scope) -> bool:
    """Whether the client sends its body only after a 100 Continue."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])


async def discard(receive: Receive) -> None:
    """Read a body that nobody wants: most clients read no answer before they have sent everything, and a connection
    that is closed meanwhile takes the answer with it."""
    seen = 0
    while seen < _MAX_DISCARD:
        message = await receive()
        seen += len(message.get("body", b""))
        if not message.get("more_body"):
            return
