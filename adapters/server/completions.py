"""/v1/completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from corogen.adapters.server.bodies import json_route
from corogen.adapters.server.replies import ERROR_RESPONSES, json_reply, new_id
from corogen.adapters.server.schema import CompletionRequest
from corogen.adapters.server.service import Service
from corogen.adapters.server.sse import event
from corogen.adapters.server.usage import Meter
from corogen.errors import EmptyPrompt
from corogen.outputs import Response as Answer


def routes(service: Service) -> APIRouter:
    """The route, for `service`."""
    router = APIRouter(tags=["OpenAI"], route_class=json_route(service.pipe.engine))

    @router.post("/v1/completions", responses=ERROR_RESPONSES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue raw text or token ids, without a chat template."""
        prompts = _prompts(body.prompt)
        call = service.call(prompts, body, do_preprocess=False)
        echoes = [_text(service, prompt) for prompt in prompts] if body.echo else []
        meter = service.meter(request, body.choices, stream=bool(body.stream))
        head = {
            "id": new_id("cmpl", request),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }
        if body.stream:
            return await service.stream(request, call, CompletionEvents(head, body, echoes, meter), meter)
        answers = await service.answers(request, call, meter)
        choices = [_choice(answer, echoes[answer.index // body.choices] if echoes else "") for answer in answers]
        return json_reply({**head, "choices": choices, "usage": meter.usage})

    return router


def _prompts(prompt: Any) -> list[Any]:
    """A list of prompts, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise EmptyPrompt("prompt is an empty list: there is nothing to continue", param="prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def _text(service: Service, prompt: Any) -> str:
    tokenizer = service.pipe.engine.admission.tokenizer
    if isinstance(prompt, str) or tokenizer is None:
        return prompt if isinstance(prompt, str) else ""
    return tokenizer.decode(prompt, skip_special_tokens=False)


def _choice(answer: Answer, echo: str) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": echo + answer.text,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


class CompletionEvents:
    """Pieces as `text_completion` events. With `echo` a choice's first one begins with its prompt."""

    def __init__(self, head: dict[str, Any], body: CompletionRequest, echoes: list[str], meter: Meter) -> None:
        options = body.stream_options
        self._head, self._meter = head, meter
        self._echoes = {i: echoes[i // body.choices] for i in range(len(echoes) * body.choices)}
        self._with_usage = options is not None and bool(options.include_usage)
        self._always = options is not None and bool(options.continuous_usage_stats)

    def piece(self, piece: Answer) -> bytes:
        """The event for a piece."""
        chunk = {**self._head, "choices": [_choice(piece, self._echoes.pop(piece.index, ""))]}
        if self._with_usage or self._always:
            chunk["usage"] = self._meter.usage if self._always else None
        return event(chunk)

    def end(self) -> bytes:
        """The usage, if it was asked for."""
        return event({**self._head, "choices": [], "usage": self._meter.usage}) if self._with_usage else b""
