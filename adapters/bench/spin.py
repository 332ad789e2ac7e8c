"""What a spinning Python thread in the application costs: the scripted step rate with and without one, in turns."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from corogen.adapters.bench import steps
from corogen.adapters.bench.figures import spread

STEPS_MS = (3.0, 5.0, 8.0)


@contextlib.contextmanager
def spinning_thread() -> Iterator[None]:
    """A thread that computes in pure Python and never gives way of its own accord."""
    over = threading.Event()

    def spin() -> None:
        count = 0
        while not over.is_set():
            for _ in range(1000):
                count += 1

    thread = threading.Thread(target=spin, name="spinner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _switch_interval(seconds: float | None) -> Iterator[None]:
    before = sys.getswitchinterval()
    if seconds is not None:
        sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def measure(
    *,
    streams: int = 64,
    new_tokens: int = 300,
    steps_ms: Sequence[float] = STEPS_MS,
    repeat: int = 3,
    switch_interval_s: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Pairs of rounds at each step time, first without and then with the thread; returns a JSON-ready result.

    Args:
        switch_interval_s: of `sys.setswitchinterval`, for the whole measurement; None: Python's own, 5 ms.
    """
    rows = []
    with _switch_interval(switch_interval_s):
        interval_ms = sys.getswitchinterval() * 1e3
        for step_ms in steps_ms:
            pairs = [_pair(streams, step_ms, new_tokens) for _ in range(repeat)]
            rows.append(_row(step_ms, pairs))
            say(f"steps of {step_ms:g} ms: {rows[-1]['kept']['median']:.3f} of the rate is left")
    return {
        "streams": streams,
        "output_len": new_tokens,
        "rounds": repeat,
        "switch_interval_ms": interval_ms,
        "rows": rows,
    }


def _pair(streams: int, step_ms: float, new_tokens: int) -> tuple[float, float]:
    quiet = steps.measure(streams=streams, step_time_s=step_ms / 1e3, new_tokens=new_tokens)
    with spinning_thread():
        beside = steps.measure(streams=streams, step_time_s=step_ms / 1e3, new_tokens=new_tokens)
    return quiet.rate_share, beside.rate_share


def _row(step_ms: float, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """`kept`: the rate beside the thread over the one without it, within each pair."""
    return {
        "step_ms": step_ms,
        "quiet": spread([quiet for quiet, _ in pairs]),
        "beside": spread([beside for _, beside in pairs]),
        "kept": spread([beside / quiet for quiet, beside in pairs]),
    }
