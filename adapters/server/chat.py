"""/v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from corogen.adapters.server.bodies import json_route
from corogen.adapters.server.replies import ERROR_RESPONSES, json_reply, new_id
from corogen.adapters.server.schema import ChatRequest
from corogen.adapters.server.service import Service
from corogen.adapters.server.sse import event
from corogen.adapters.server.usage import Meter
from corogen.errors import InvalidRequest
from corogen.outputs import Response as Answer


def routes(service: Service) -> APIRouter:
    """The route, for `service`."""
    router = APIRouter(tags=["OpenAI"], route_class=json_route(service.pipe.engine))

    @router.post("/v1/chat/completions", responses=ERROR_RESPONSES)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        if not body.messages:
            raise InvalidRequest("messages is empty: send at least one", param="messages")
        call = service.call([body.messages], body, do_preprocess=True)
        meter = service.meter(request, body.choices, stream=bool(body.stream))
        head = {"id": new_id("chatcmpl", request), "created": int(time.time()), "model": service.name}
        if body.stream:
            return await service.stream(request, call, ChatEvents(head, body, meter), meter)
        answers = await service.answers(request, call, meter)
        choices = [_choice(answer) for answer in answers]
        return json_reply({**head, "object": "chat.completion", "choices": choices, "usage": meter.usage})

    return router


def _choice(answer: Answer) -> dict[str, Any]:
    return {
        "index": answer.index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


class ChatEvents:
    """Pieces as `chat.completion.chunk` events. A choice's first one carries the role."""

    def __init__(self, head: dict[str, Any], body: ChatRequest, meter: Meter) -> None:
        options = body.stream_options
        self._head = {**head, "object": "chat.completion.chunk"}
        self._meter = meter
        self._with_usage = options is not None and bool(options.include_usage)
        self._always = options is not None and bool(options.continuous_usage_stats)
        self._begun: set[int] = set()

    def piece(self, piece: Answer) -> bytes:
        """Events for a piece."""
        out = b""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            out = self._chunk(piece.index, {"role": "assistant", "content": ""}, None, None)
        if piece.text:
            out += self._chunk(piece.index, {"content": piece.text}, None, None)
        if piece.finish_reason is not None:
            out += self._chunk(piece.index, {}, piece.finish_reason, piece.stop_reason)
        return out

    def end(self) -> bytes:
        """The usage, if it was asked for."""
        return event({**self._head, "choices": [], "usage": self._meter.usage}) if self._with_usage else b""

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None, reason: str | int | None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = reason
        chunk = {**self._head, "choices": [choice]}
        if self._with_usage or self._always:
            chunk["usage"] = self._meter.usage if self._always else None
        return event(chunk)
