"""How long requests waited, took and came, and how long steps took: counted in buckets, and logged."""

from __future__ import annotations

import logging
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from corogen.outputs import Times

if TYPE_CHECKING:
    from corogen.request import ActiveRequest

logger = logging.getLogger("corogen.requests")
step_logger = logging.getLogger("corogen.steps")

#: upper bounds in seconds; the last bucket has none
STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REQUEST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Durations in buckets. Added to by one thread; read by any."""

    __slots__ = ("_bounds", "_counts", "_max", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = self._max = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds
        self._max = max(self._max, seconds)

    def times(self) -> Times:
        """A picture of this moment."""
        cumulative = list(accumulate(self._counts))
        return Times(cumulative[-1], self._total, self._max, dict(zip(self._bounds, cumulative, strict=False)))


class Telemetry:
    """Hears of every turn in the life of requests and steps. On the engine's loop, in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self.queue_time = Histogram(REQUEST_BOUNDS)
        self.first_token_time = Histogram(REQUEST_BOUNDS)
        self.request_time = Histogram(REQUEST_BOUNDS)
        self.step_time = Histogram(STEP_BOUNDS)
        self.prompt_tokens = 0
        self.new_tokens = 0

    def started(self, active: ActiveRequest, now: float) -> None:
        """The request runs for the first time."""
        active.started_at = now
        self.queue_time.add(now - active.request.arrival)

    def first_token(self, active: ActiveRequest, now: float) -> None:
        """Its first token is there."""
        active.first_token_at = now
        self.prompt_tokens += active.seq.prompt_len
        self.first_token_time.add(now - active.request.arrival)

    def ended(self, active: ActiveRequest, reason: str, running: int, now: float) -> None:
        """It has ended, for whatever reason."""
        total = now - active.request.arrival
        new = len(active.seq.tokens) - active.seq.prompt_len
        self.new_tokens += new
        self.request_time.add(total)
        if logger.isEnabledFor(logging.INFO):
            figures = {
                "request_id": active.request.id,
                "reason": reason,
                "prompt_tokens": active.seq.prompt_len,
                "cached_tokens": active.seq.num_cached,
                "new_tokens": new,
                "queue_s": _since(active.request.arrival, active.started_at),
                "first_token_s": _since(active.request.arrival, active.first_token_at),
                "total_s": round(total, 4),
                "running": running,
            }
            logger.info("request %s", " ".join(f"{k}={v}" for k, v in figures.items()), extra=figures)

    def step(self, step: int, prefill: int, decode: int, running: int, duration_s: float) -> None:
        """A step's result is in."""
        self.step_time.add(duration_s)
        if step_logger.isEnabledFor(logging.DEBUG):
            figures = {
                "step": step,
                "prefill_rows": prefill,
                "decode_rows": decode,
                "running": running,
                "duration_s": round(duration_s, 5),
            }
            step_logger.debug("%s", " ".join(f"{k}={v}" for k, v in figures.items()), extra=figures)


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 4)
