"""A small HTTP client for measurements: a piece of a stream costs it microseconds, where general clients take a fifth
of a millisecond, which on a machine that also computes would be measured as the server's."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

#: hears of each part of a body as it comes: status of the answer, bytes
OnBody = Callable[[int, bytes], None]


class HttpPool:
    """Connections to one server, kept open, each with one request at a time. For one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        given = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Send `body`, let `on_body` hear the answer, and return its status.

        Raises:
            OSError: the connection can not be made, or broke.
        """
        connection = await self._connection()
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        try:
            status = await connection.exchange(head.encode("latin-1") + body, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        return status

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        self._all.add(made)
        return made

    async def __aenter__(self) -> HttpPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._all:
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection; `httptools` calls the `on_...` methods while it reads."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None
        self.reusable = True

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send one request; its answer's status, once the answer is complete."""
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._hear, self._status = on_body, 0
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server has closed the connection")
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Close it, whatever it does."""
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self._fail(ConnectionError(f"the answer can not be read: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone."""
        self.reusable = False
        self._fail(ConnectionResetError("the server closed the connection before its answer was complete"))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def on_headers_complete(self) -> None:
        """The status is known."""
        self._status = self._parser.get_status_code()
        self.reusable = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._hear(self._status, body)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._status)
