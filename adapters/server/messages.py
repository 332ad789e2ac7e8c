"""Messages of a chat: from what clients send to what chat templates know."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from corogen.adapters.server.errors import ApiError
from corogen.adapters.server.parsing import parse


def template_form(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates know them: arguments of tool calls, which travel as JSON text, as objects."""
    return [_with_objects(message) if message.get("tool_calls") else message for message in messages]


#: a field of a request's body
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(template_form)]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise PydanticCustomError("tool_calls", "tool_calls of a message must be a list")
    return {**message, "tool_calls": [_call_with_object(call) for call in calls]}


def _call_with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse(function["arguments"].encode())
    except (ApiError, UnicodeEncodeError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
