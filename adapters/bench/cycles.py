"""Pipelines that are opened, asked once and closed, one after the other: what each leaves behind."""

from __future__ import annotations

import time
from typing import Any

from corogen.adapters.bench.chaos import Say, answers, ask_about
from corogen.adapters.bench.engines import Opener
from corogen.adapters.bench.leaks import Holdings, slope

#: bytes that memory may grow by a cycle, over the second half of the cycles
_MAX_SLOPE = 1e6


def measure(opener: Opener, count: int = 10, *, say: Say = lambda line: None) -> dict[str, Any]:
    """Open, answer, close, `count` times; returns a JSON-ready result.

    `cycles` holds threads, children, descriptors and memory after each; `problems` what the later ones leave that
    the first did not.
    """
    before = Holdings.now()
    found: list[Holdings] = []
    rows: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        start = time.perf_counter()
        with opener() as (pipe, _):
            opened = time.perf_counter()
            answers(pipe, ask_about(pipe, 1, 8, number))
            answered = time.perf_counter()
        closed = time.perf_counter()
        found.append(Holdings.now(settle=before))
        times = {"open_s": opened - start, "answer_s": answered - opened, "close_s": closed - answered}
        rows.append({"cycle": number, **times, **found[-1].figures()})
        say(f"cycle {number} of {count}: open for {closed - start:.2f} s")
    by = slope([(number, now.rss) for number, now in enumerate(found) if now.rss is not None])
    problems = found[-1].leaked_since(found[0])
    if by is not None and by > _MAX_SLOPE:
        problems.append(f"memory grows by {by / 1e6:.1f} MB a cycle")
    return {"before": before.figures(), "cycles": rows, "bytes_per_cycle": by, "problems": problems}
