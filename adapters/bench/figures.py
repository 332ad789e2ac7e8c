"""Pure arithmetic on measurements: percentiles, intervals, and what a stream's arrival times say."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTS = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0 to 100) of `values` lie, interpolated linearly; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 of times in seconds, as milliseconds."""
    return {f"p{percent}": percentile(seconds, percent) * 1e3 for percent in PERCENTS}


def bootstrap_median(
    values: Sequence[float], *, level: float = 0.9, resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """An interval that holds the median with probability `level`, from resampling `values`. Repeatable."""
    if not values:
        return math.nan, math.nan
    rng = random.Random(seed)
    medians = [statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples)]
    tail = (1 - level) / 2 * 100
    return percentile(medians, tail), percentile(medians, 100 - tail)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the 90 % interval of the median of repeated measurements."""
    low, high = bootstrap_median(values)
    return {
        "values": list(values),
        "median": statistics.median(values) if values else math.nan,
        "min": min(values, default=math.nan),
        "max": max(values, default=math.nan),
        "interval_90": [low, high],
    }


@dataclass
class Timeline:
    """When the pieces of one streamed answer came. Times in seconds on one clock."""

    submitted: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def note(self, at: float, tokens: int) -> None:
        """A piece of `tokens` tokens came."""
        self.arrivals.append(at)
        self.tokens.append(tokens)

    @property
    def total(self) -> int:
        """Tokens so far."""
        return sum(self.tokens)

    @property
    def first(self) -> float:
        """Seconds to the first piece (TTFT)."""
        return self.arrivals[0] - self.submitted if self.arrivals else math.nan

    @property
    def per_token(self) -> float:
        """Mean seconds a token after the first piece (TPOT); NaN if everything came at once."""
        later = sum(self.tokens[1:])
        return (self.arrivals[-1] - self.arrivals[0]) / later if later else math.nan

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces (ITL)."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def stream_figures(lines: Iterable[Timeline]) -> dict[str, Any]:
    """Percentiles of TTFT, TPOT and ITL over streams, in milliseconds, and how many tokens came in one piece."""
    seen = [line for line in lines if line.arrivals]
    pieces = sum(len(line.arrivals) for line in seen)
    return {
        "ttft_ms": summary_ms([line.first for line in seen]),
        "tpot_ms": summary_ms([line.per_token for line in seen if not math.isnan(line.per_token)]),
        "itl_ms": summary_ms([gap for line in seen for gap in line.gaps]),
        "tokens_per_piece": sum(line.total for line in seen) / pieces if pieces else math.nan,
    }
