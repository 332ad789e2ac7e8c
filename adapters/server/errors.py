"""Errors as OpenAI's clients expect them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from corogen.adapters.server.settings import ServerSettings
from corogen.errors import (
    CorogenError,
    EngineClosed,
    InvalidRequest,
    QueueFullError,
    RequestAborted,
    RequestTimeout,
    WorkerError,
)

#: status by class of error; a subclass without an entry has its parent's
STATUS: dict[type[BaseException], int] = {
    InvalidRequest: 400,
    QueueFullError: 429,
    RequestTimeout: 504,
    RequestAborted: 503,
    EngineClosed: 503,
    WorkerError: 503,
    CorogenError: 500,
}

#: settings that have another name over HTTP
HTTP_NAMES = {
    "random_seed": "seed",
    "stop_words": "stop",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}

_encode = msgspec.json.Encoder().encode


class ApiError(HTTPException):
    """An answer that is an error. `param` names the field at fault; `code` is a stable word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status, self.message, self.param = status, message, param
        self.code = (
            _CODES.get(status, "internal_error" if status >= 500 else "invalid_request") if code is None else code
        )

    @property
    def envelope(self) -> dict[str, Any]:
        """The body."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return Response(_encode(self.envelope), self.status, self.headers, "application/json")


def to_api_error(error: BaseException, settings: ServerSettings, *, prompt_field: str = "prompt") -> ApiError:
    """What a client is told of an error. `prompt_field`: what the prompt is called in the request.

    What is no CorogenError is a fault of ours, of which clients learn nothing more.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, CorogenError):
        return ApiError(500, "the server failed at this request; its log says more")
    status = next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)
    headers: dict[str, str] = {}
    if isinstance(error, QueueFullError | EngineClosed | WorkerError):
        headers["Retry-After"] = str(settings.retry_after_s)
    param, message = getattr(error, "param", None), str(error)
    if isinstance(error, QueueFullError):
        status, message = settings.overload_status, _words_of_a_full_queue(error)
    if param in HTTP_NAMES:
        message = re.sub(rf"\b{param}\b", HTTP_NAMES[param], message)
        param = HTTP_NAMES[param]
    elif param == "prompt":
        param = prompt_field
    if isinstance(error, WorkerError):  # its words hold a traceback, which is nothing for clients
        message = message.partition("\n")[0]
    return ApiError(status, message, code=error.code, param=param, headers=headers)


def _words_of_a_full_queue(error: QueueFullError) -> str:
    waiting = f", {error.waiting_tokens} waiting tokens" if error.token_limit else ""
    return f"the server is full ({error.outstanding} running and waiting requests{waiting}): try again later"


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body; without the value itself, which may be a prompt."""
    problem = problems[0]
    where = [part for part in problem["loc"] if part != "body"]
    param = str(where[0]) if where and isinstance(where[0], str) else None
    if param is None:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if problem["type"] == "missing":
        return ApiError(400, f"{param} is missing", code="missing_parameter", param=param)
    return ApiError(400, f"{param}: {problem['msg']}", code="invalid_value", param=param)


def install(app: FastAPI, settings: ServerSettings) -> None:
    """Let every error that a route raises come out in the envelope."""

    async def known(request: Request, error: Exception) -> Response:
        field = "messages" if request.url.path.endswith("/chat/completions") else "prompt"
        found = to_api_error(error, settings, prompt_field=field)
        note_error(request.scope, found)
        return found.response()

    async def validation(request: Request, error: Exception) -> Response:
        found = from_validation(error.errors() if isinstance(error, RequestValidationError) else [])
        note_error(request.scope, found)
        return found.response()

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else ""
        headers = error.headers if isinstance(error, HTTPException) else None
        found = ApiError(status, _http_words(status, request, detail), headers=headers)
        note_error(request.scope, found)
        return found.response()

    app.add_exception_handler(CorogenError, known)
    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)


def _http_words(status: int, request: Request, detail: str) -> str:
    if status == 404:
        return f"there is nothing at {request.url.path}; /docs lists what there is"
    if status == 405:
        return f"{request.url.path} does not answer {request.method}"
    return detail


def note_error(scope: Any, error: ApiError) -> None:
    """Tell the request log which error it was; by code and field, since messages may quote a prompt."""
    record = scope.get("corogen.record")
    if record is not None:
        record.note(error=error.code, param=error.param)
