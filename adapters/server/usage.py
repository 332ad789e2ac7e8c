"""Counting: tokens of a request for its answer, its log line and the metrics."""

from __future__ import annotations

import time
from typing import Any

from corogen.adapters.server.logging import Record
from corogen.adapters.server.metrics import Metrics
from corogen.outputs import Response as Answer


class Meter:
    """Takes every piece or answer of one HTTP request whose prompts have `n` choices each."""

    def __init__(self, metrics: Metrics, record: Record, n: int, *, stream: bool) -> None:
        self._metrics, self._record, self._n, self._stream = metrics, record, n, stream
        self._begun = time.perf_counter()
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._answers: dict[int, int] = {}
        self._firsts: dict[int, tuple[float, int]] = {}
        self._last: dict[int, float] = {}
        self._ended: dict[int, str] = {}

    def take(self, piece: Answer) -> None:
        """Count a piece, or a whole answer."""
        index, now, metrics = piece.index, time.perf_counter(), self._metrics
        prompt = index // self._n
        if prompt not in self._prompts:
            self._prompts[prompt] = piece.input_token_len
            metrics.prompt(piece.input_token_len)
        metrics.generated(piece.generate_token_len - self._answers.get(index, 0))
        self._answers[index] = piece.generate_token_len
        if self._stream:
            self._time(index, piece.generate_token_len, now)
        if piece.finish_reason is not None:
            self._ended[index] = piece.finish_reason
            if not index % self._n:
                self._cached[prompt] = piece.cached_tokens
            metrics.answer_len.observe(piece.generate_token_len)
            if self._stream:
                self._observe_pace(index, piece.generate_token_len, now)

    def _time(self, index: int, tokens: int, now: float) -> None:
        if index in self._last:
            self._metrics.itl.observe(now - self._last[index])
        else:
            self._firsts[index] = now, tokens
        self._last[index] = now

    def _observe_pace(self, index: int, tokens: int, now: float) -> None:
        first, begun_with = self._firsts[index]
        if tokens > begun_with:
            self._metrics.tpot.observe((now - first) / (tokens - begun_with))

    def finish(self) -> None:
        """No more will come: complete the log line."""
        first = min((at for at, _ in self._firsts.values()), default=None)
        self._record.note(
            prompt_tokens=sum(self._prompts.values()),
            completion_tokens=sum(self._answers.values()),
            cached_tokens=sum(self._cached.values()) or None,
            finish=",".join(sorted(set(self._ended.values()))) or None,
            ttft_ms=None if first is None else round((first - self._begun) * 1e3, 1),
        )

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` so far: every prompt counted once, all choices summed."""
        prompt, completion = sum(self._prompts.values()), sum(self._answers.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
