"""What callers receive: responses and figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Response:
    """The answer to one prompt, or one piece of it while streaming.

    In a streamed piece `text` and `token_ids` hold only what is new; `generate_token_len` counts from the beginning.
    `token_ids` holds every id that was generated, the one that ended the answer included; `text` ends before it.
    """

    text: str = ""
    generate_token_len: int = 0
    input_token_len: int = 0
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    index: int = 0
    cached_tokens: int = 0
    #: the stop string or token id that ended the answer, if one did
    stop_reason: str | int | None = None
    error_code: str | None = None
    error_message: str | None = None

    def extend(self, piece: Response) -> Response:
        """Append a later piece of the same stream and return self."""
        self.text += piece.text
        self.token_ids.extend(piece.token_ids)
        self.generate_token_len = piece.generate_token_len
        self.input_token_len = piece.input_token_len
        self.cached_tokens = piece.cached_tokens
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        self.error_code, self.error_message = piece.error_code, piece.error_message
        return self

    @classmethod
    def from_error(cls, error: BaseException, *, index: int = 0) -> Response:
        """The item that stands for a prompt that could not be answered."""
        code = getattr(error, "code", "internal_error")
        return cls(finish_reason="error", index=index, error_code=code, error_message=str(error) or repr(error))


@dataclass(frozen=True, slots=True)
class Times:
    """Durations that were measured so far, in seconds."""

    count: int
    total_s: float
    max_s: float
    #: {upper bound in seconds: durations up to it}, as Prometheus counts them
    buckets: dict[float, int]

    @property
    def mean_s(self) -> float:
        """The average; 0 before the first."""
        return self.total_s / self.count if self.count else 0.0


class EngineStats(NamedTuple):
    """A picture of the engine at one moment."""

    #: requests that hold a slot
    running: int
    #: requests that are admitted and wait for a slot, or outside for room
    waiting: int
    #: blocks that hold nothing
    blocks_free: int
    #: blocks that no request uses and that can be hit by a later prompt
    blocks_cached: int
    #: blocks of running requests
    blocks_used: int
    #: steps whose result has arrived
    steps: int
    #: times that a running request was put back to free its blocks
    preemptions: int
    #: times that the workers were started again
    restarts: int
    #: prompt tokens that were found in the prefix cache
    cached_tokens: int
    #: prompt tokens of the requests that have a token
    prompt_tokens: int
    #: generated tokens of the requests that have ended
    new_tokens: int
    #: requests that ended, by finish reason; "timeout" and "error" among them
    ended: dict[str, int]
    #: from a request's arrival until it first ran
    queue_time: Times
    #: from a request's arrival to its first token
    first_token_time: Times
    #: from a request's arrival to its end, for whatever reason
    request_time: Times
    #: of the workers, a step; these add up to the time that the workers were busy
    step_time: Times


class StepRecord(NamedTuple):
    """One line of the step log."""

    step: int
    prefill_rows: int
    decode_rows: int
    running: int
    waiting: int
    #: from its dispatch, or from the result before it if that came later, to its result
    duration_s: float
