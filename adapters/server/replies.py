"""JSON answers and their ids."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

_encode = msgspec.json.Encoder().encode

_EXAMPLE = {
    "error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}
}
_BODY = {"application/json": {"example": _EXAMPLE}}

#: for the schema page: what every route may answer instead
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request can not be right; `param` names the field", "content": _BODY},
    401: {"description": "No key, or a wrong one", "content": _BODY},
    404: {"description": "Another model's name", "content": _BODY},
    413: {"description": "The body is too large", "content": _BODY},
    422: {"description": "Never: such requests get 400", "content": _BODY},
    429: {"description": "The queue is full; see Retry-After", "content": _BODY},
    503: {"description": "The engine is closing, or its workers can not be started", "content": _BODY},
}


def json_reply(data: Any) -> Response:
    """200 with JSON."""
    return Response(_encode(data), media_type="application/json")


def new_id(kind: str, request: Request) -> str:
    """The id of an answer: `kind` and the id of the HTTP request."""
    return f"{kind}-{request.scope['corogen.record'].id}"
