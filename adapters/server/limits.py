"""A bound on request bodies, whether or not their length is announced."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corogen.adapters.server.errors import ApiError, note_error

#: what is left of a body that is refused is not read, so the connection can not be used again
_CLOSE = {"Connection": "close"}


class LimitBody:
    """Pure ASGI middleware: 413 for a body above `max_bytes`, announced or sent in chunks."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _announced(scope) > self._max_bytes:
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
                raise HTTPException(413, self._words, headers=_CLOSE)
            return message

        return count

    @property
    def _words(self) -> str:
        return f"the body is larger than {self._max_bytes / 2**20:g} MiB, the most that this server takes"


def _announced(scope: Scope) -> int:
    value = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(value) if value.isdigit() else 0
