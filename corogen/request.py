"""A request's way through the engine: its text, its stop rule, its one end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from corogen.outputs import FinishReason
from corogen.schedule import Sequence
from corogen.text.detokenize import Detokenizer
from corogen.text.stop import StopMatcher

if TYPE_CHECKING:
    from corogen.admission import Request
    from corogen.text.tokenizer import Tokenizer


class Sink(Protocol):
    """Where a request's output goes; called on the engine's loop, must not block and must not raise."""

    pieces: bool

    def began(self, prompt_len: int) -> None:
        """The request is admitted."""

    def push(self, text: str, token_id: int) -> None:
        """One token and the text that it completed."""

    def end(self, text: str, reason: FinishReason, stop_reason: str | int | None, cached: int) -> None:
        """The last text, and why there is no more."""

    def fail(self, error: BaseException) -> None:
        """The request failed."""


class ActiveRequest:
    """An admitted request. `advance` takes each sampled token and says whether it ended the answer."""

    __slots__ = (
        "_detokenizer",
        "_ids",
        "_matcher",
        "_stop_ids",
        "first_token_at",
        "inside",
        "request",
        "seq",
        "sink",
        "started_at",
        "tokenizer",
        "waiting_tokens",
    )

    def __init__(self, request: Request, sink: Sink, tokenizer: Tokenizer | None) -> None:
        self.request, self.sink, self.tokenizer = request, sink, tokenizer
        self.seq = Sequence(
            request.prompt_ids,
            request.sampling,
            request.max_new_tokens,
            priority=request.priority,
            arrival=request.arrival,
            owner=self,
        )
        #: counted by the intake; False while it waits outside
        self.inside = False
        self.waiting_tokens = 0
        #: `time.monotonic()` of its first run and of its first token
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        stop = request.stop
        self._stop_ids = stop.token_ids
        self._matcher = StopMatcher(stop.strings, stop.include) if stop.strings else None
        # without a reader of pieces and without stop strings, the text is decoded once, at the end
        live = tokenizer is not None and (sink.pieces or self._matcher is not None)
        skip = request.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip) if live and tokenizer else None
        sink.began(len(request.prompt_ids))

    def advance(self, token: int) -> FinishReason | None:
        """One sampled token, already appended to the sequence. The finish reason if the request has ended with it."""
        if token in self._stop_ids:
            self._stop_at(token)
            return "stop"
        text = self._detokenizer.push(token) if self._detokenizer is not None else ""
        if self._matcher is not None:
            text, hit = self._matcher.push(text)
            if hit is not None:
                self.sink.push("", token)
                self._end(text, "stop", hit)
                return "stop"
        self.sink.push(text, token)
        if len(self.seq.tokens) >= self.seq.limit:
            self._end(self._rest(), "length", None)
            return "length"
        return None

    def abort(self) -> None:
        """End as aborted, with the text that is certain."""
        self._end(self._rest(), "abort", None)

    def _stop_at(self, token: int) -> None:
        """The token that stops belongs to the ids; its text is shown only on request."""
        self.sink.push("", token)
        rest = ""
        if self.request.stop.include and self._detokenizer is not None:
            rest = self._detokenizer.push(token)
        stop = self.request.stop
        self._end(rest + self._rest(without_last=not stop.include), "stop", stop.reasons.get(token))

    def _rest(self, *, without_last: bool = False) -> str:
        """What was held back, or the whole text if nothing was decoded on the way."""
        if self._detokenizer is None:
            if self.tokenizer is None:
                return ""
            ids = self.seq.tokens[self.seq.prompt_len : len(self.seq.tokens) - without_last]
            return self.tokenizer.decode(ids, skip_special_tokens=self.request.skip_special_tokens)
        tail = self._detokenizer.flush()
        if self._matcher is None:
            return tail
        text, hit = self._matcher.push(tail)
        return text if hit is not None else text + self._matcher.flush()

    def _end(self, text: str, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.sink.end(text, reason, stop_reason, self.seq.num_cached)
