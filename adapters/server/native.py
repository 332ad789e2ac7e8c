"""Routes beside OpenAI's: tokens in and out, and EnergonAI's payload."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from corogen.adapters.calls import check_call
from corogen.adapters.server.bodies import json_route
from corogen.adapters.server.disconnect import unless_gone
from corogen.adapters.server.errors import ApiError
from corogen.adapters.server.replies import ERROR_RESPONSES, json_reply, new_id
from corogen.adapters.server.schema import DetokenizeRequest, EnergonRequest, GenerateRequest, TokenizeRequest
from corogen.adapters.server.service import Service, as_one
from corogen.adapters.server.sse import event
from corogen.admission import LONG_TEXT, refuse_surrogates
from corogen.errors import InvalidRequest
from corogen.outputs import Response as Answer
from corogen.text.tokenizer import Tokenizer


def routes(service: Service) -> APIRouter:
    """The routes, for `service`."""
    router = APIRouter(tags=["tokens"], route_class=json_route(service.pipe.engine))

    @router.post("/generate", responses=ERROR_RESPONSES)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue raw text or token ids; text and token ids come back. Streamed pieces hold only what is new."""
        if (body.prompt is None) == (body.input_ids is None):
            raise InvalidRequest("give either prompt or input_ids", param="prompt")
        if body.choices > 1:
            raise InvalidRequest("n is for /v1/completions: this route gives one answer", param="n")
        prompt = body.prompt if body.input_ids is None else body.input_ids
        call = service.call([prompt], body, do_preprocess=False)
        meter = service.meter(request, 1, stream=bool(body.stream))
        reply_id = new_id("gen", request)
        if body.stream:
            return await service.stream(request, call, TokenEvents(reply_id), meter)
        [answer] = await service.answers(request, call, meter)
        return json_reply(_with_tokens(answer, reply_id))

    @router.post("/generation", responses=ERROR_RESPONSES, tags=["EnergonAI"])
    async def generation(body: EnergonRequest, request: Request) -> Response:
        """Continue raw text, as EnergonAI's servers do."""
        call = as_one(check_call([body.prompt], body.gen_config(), False, None))
        [answer] = await service.answers(request, call, service.meter(request, 1, stream=False))
        return json_reply({"text": answer.text})

    @router.post("/tokenize", responses=ERROR_RESPONSES)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a raw text, or of messages in the chat template."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        ids = await unless_gone(request.receive, _ids(service, body))
        facts = service.pipe.engine.admission.facts
        return json_reply({"tokens": ids, "count": len(ids), "max_model_len": facts.max_len})

    @router.post("/detokenize", responses=ERROR_RESPONSES)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        service.check_model(body.model)
        text = await unless_gone(request.receive, _text(service, body))
        return json_reply({"prompt": text})

    return router


def _with_tokens(answer: Answer, reply_id: str) -> dict[str, Any]:
    return {
        "text": answer.text,
        "output_ids": answer.token_ids,
        "meta_info": {
            "id": reply_id,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "prompt_tokens": answer.input_token_len,
            "completion_tokens": answer.generate_token_len,
            "cached_tokens": answer.cached_tokens,
        },
    }


class TokenEvents:
    """Pieces as events with text and token ids."""

    def __init__(self, reply_id: str) -> None:
        self._id = reply_id

    def piece(self, piece: Answer) -> bytes:
        """The event for a piece."""
        return event(_with_tokens(piece, self._id))

    def end(self) -> bytes:
        """Nothing more."""
        return b""


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.pipe.engine.admission.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the model is served without a tokenizer")
    return tokenizer


async def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    """In the engine's pool if the text is long, as a request's own prompt would be."""
    admission = service.pipe.engine.admission
    messages = body.messages
    prompt: Any = body.prompt if messages is None else messages

    def encode() -> list[int]:
        if messages is not None:
            return admission.chat_ids(messages)
        refuse_surrogates(prompt)
        return _tokenizer(service).encode(prompt, add_special_tokens=body.add_special_tokens)

    if not admission.is_long(prompt):
        return encode()
    return await service.pipe.engine.text_pool.run(encode)


async def _text(service: Service, body: DetokenizeRequest) -> str:
    """In the pool if there are many."""
    tokenizer, facts = _tokenizer(service), service.pipe.engine.admission.facts
    size = max(tokenizer.vocab_size, facts.vocab_size)  # a model may embed more, to fill a block, or fewer

    def decode() -> str:
        if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < size):
            raise InvalidRequest(f"tokens holds an id that is not in 0 to {size - 1}", param="tokens")
        return tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)

    return decode() if len(body.tokens) < LONG_TEXT else await service.pipe.engine.text_pool.run(decode)
