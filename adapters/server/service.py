"""What all routes share: the pipeline, the names under which it is served, and how a call is carried out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request

from corogen.adapters.calls import Call, check_call
from corogen.adapters.server.disconnect import unless_gone
from corogen.adapters.server.errors import ApiError, note_error, to_api_error
from corogen.adapters.server.health import Pulse
from corogen.adapters.server.logging import Record, log_fault
from corogen.adapters.server.metrics import Metrics
from corogen.adapters.server.schema import GenerationFields
from corogen.adapters.server.settings import ServerSettings
from corogen.adapters.server.sse import Events, EventStream, next_piece
from corogen.adapters.server.usage import Meter
from corogen.adapters.streams import AsyncStream, collect_async
from corogen.errors import CorogenError, RequestAborted
from corogen.outputs import Response as Answer

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline


class Service:
    """One pipeline behind HTTP."""

    def __init__(self, pipe: Pipeline, settings: ServerSettings) -> None:
        self.pipe, self.settings = pipe, settings
        self.name = settings.served_model_names[0]
        self.metrics = Metrics(pipe, self.name)
        self.pulse = Pulse(pipe)
        self.created = int(time.time())

    def check_model(self, wanted: str | None) -> None:
        """Raise 404 unless `wanted` is a served name, or was left out."""
        if wanted is not None and wanted not in self.settings.served_model_names:
            words = f"the model {wanted[:200]!r} is not served here; GET /v1/models says what is"
            raise ApiError(404, words, code="model_not_found", param="model")

    def call(self, prompts: Sequence[Any], body: GenerationFields, *, do_preprocess: bool) -> Call:
        """`n` choices of each prompt, neighbours in the list, as one call that fails as a whole.

        Raises:
            InvalidRequest, ApiError: something is wrong with the request.
        """
        self.check_model(body.model)
        body.check()
        n = body.choices
        if len(prompts) * n > self.settings.max_choices:
            raise ApiError(
                400, f"{len(prompts)} prompts times n={n} are more than {self.settings.max_choices} choices", param="n"
            )
        room = self.pipe.config.queue_size
        if room and len(prompts) * n > room:
            raise ApiError(
                400, f"{len(prompts)} prompts times n={n} are more than the {room} that may wait here at all", param="n"
            )
        samples = self.pipe.engine.admission.facts.samples
        configs = [body.gen_config(choice, model_samples=samples) for choice in range(n)]
        every = [prompt for prompt in prompts for _ in range(n)]
        return as_one(check_call(every, configs * len(prompts), do_preprocess, None))

    async def answers(self, request: Request, call: Call, meter: Meter) -> list[Answer]:
        """Whole answers, in order. Raises ClientGone, CorogenError."""
        answers = await unless_gone(request.receive, collect_async(self.pipe.thread, call))
        for answer in answers:
            meter.take(answer)
            refuse_cut_short(answer)
        meter.finish()
        return answers

    async def stream(self, request: Request, call: Call, events: Events, meter: Meter) -> EventStream:
        """Answers as events.

        Waits for the first piece, so that what is wrong with the request becomes a status; but not so long that a
        proxy would lose patience. Raises ClientGone, CorogenError.
        """
        pieces, first = AsyncStream(self.pipe.thread, call), None
        try:
            first = await unless_gone(request.receive, next_piece(pieces, self.settings.keep_alive_s))
        except BaseException as error:
            if type(error) is not TimeoutError:  # which a RequestTimeout is, too
                await pieces.aclose()
                raise

        def failed(error: Exception) -> dict[str, Any]:
            found = to_api_error(error, self.settings)
            note_error(request.scope, found)
            if not isinstance(error, CorogenError):
                log_fault(request.scope["corogen.record"], error)
            return found.envelope

        return EventStream(
            pieces, Metered(events, meter), first=first, failed=failed, keep_alive_s=self.settings.keep_alive_s
        )

    def meter(self, request: Request, n: int, *, stream: bool) -> Meter:
        """Counts the tokens of this request."""
        record: Record = request.scope["corogen.record"]
        record.note(stream=stream, n=n if n > 1 else None)
        return Meter(self.metrics, record, n, stream=stream)


class Metered:
    """Events whose pieces are counted."""

    def __init__(self, events: Events, meter: Meter) -> None:
        self._events, self._meter = events, meter

    def piece(self, piece: Answer) -> bytes:
        """Events for a piece. Raises RequestAborted."""
        self._meter.take(piece)
        refuse_cut_short(piece)
        return self._events.piece(piece)

    def end(self) -> bytes:
        """Events after the last piece."""
        return self._events.end()

    def close(self) -> None:
        """The response has ended, however it did."""
        self._meter.finish()


def as_one(call: Call) -> Call:
    """The same prompts, all or nothing: the first error ends them all and is raised."""
    return dataclasses.replace(call, single=True)


def refuse_cut_short(answer: Answer) -> None:
    """Raise RequestAborted for an answer that somebody on the server's side stopped: clients know no such ending."""
    if answer.finish_reason == "abort":
        raise RequestAborted("the request was aborted on the server's side before its answer was complete")
