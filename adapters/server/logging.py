"""One line in the log for each request: ids, lengths, times and how it ended. Never a word of a prompt or an answer."""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import time
import traceback
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corogen.adapters.server.disconnect import ClientGone
from corogen.adapters.server.errors import ApiError
from corogen.adapters.server.metrics import Metrics

logger = logging.getLogger("corogen.server")

#: asked again and again by machines: their lines are for debugging
_QUIET = frozenset({"/health", "/metrics"})

_MAX_ID = 128

#: ids of our own: random once, then counted, since asking the system for random bytes costs more than all the rest
_RUN, _numbers = secrets.token_hex(12), itertools.count(1)


class Record:
    """What is known about one HTTP request. Routes add to it by `note`; lies in `scope["corogen.record"]`."""

    def __init__(self, scope: Scope) -> None:
        self.id = _given_id(scope) or f"{_RUN}{next(_numbers):08x}"
        self.method, self.path = scope["method"], scope["path"]
        self.client = (scope.get("client") or ("-",))[0]
        self.status = 0
        self.details: dict[str, Any] = {}
        self._begun = time.perf_counter()

    def note(self, **details: Any) -> None:
        """Add facts; None is left out."""
        self.details.update((name, value) for name, value in details.items() if value is not None)

    def fields(self) -> dict[str, Any]:
        """The line as a dict."""
        took = round((time.perf_counter() - self._begun) * 1e3, 1)
        status = self.status or "disconnected"
        head = {"request_id": self.id, "client": self.client, "method": self.method, "path": self.path}
        return {**head, "status": status, "ms": took, **self.details}

    def write(self) -> None:
        """Log it."""
        level = logging.DEBUG if self.path in _QUIET else logging.WARNING if self.status >= 500 else logging.INFO
        if logger.isEnabledFor(level):
            fields = self.fields()
            logger.log(level, "%s", " ".join(f"{k}={_shown(v)}" for k, v in fields.items()), extra={"fields": fields})


def _shown(value: Any) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


def _given_id(scope: Scope) -> str | None:
    """The client's own id, if it is one that can stand in a log and a header."""
    value = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    return value if 0 < len(value) <= _MAX_ID and value.isascii() and value.isprintable() and " " not in value else None


class RequestLog:
    """Pure ASGI middleware, outermost: request ids in and out, the log line, and 500 for what nobody caught."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["corogen.record"] = Record(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            record.note(disconnected=True)
        except Exception as error:
            log_fault(record, error)
            if not record.status:
                await ApiError(500, "the server failed at this request; its log says more").response()(
                    scope, receive, send_with_id
                )
        finally:
            self._metrics.answered(scope, record.status)
            record.write()


def log_fault(record: Record, error: Exception) -> None:
    """Log where a fault of ours happened; without the exception's words and values, which may quote a prompt."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request_id=%s failed with %s at\n%s", record.id, type(error).__name__, where)


class JsonFormatter(logging.Formatter):
    """Log records as one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        line.update(fields if fields is not None else {"message": record.getMessage()})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
