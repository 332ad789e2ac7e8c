"""Mixed callers, cancellations and faults for a long time: nothing may grow, nobody may be stuck."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from corogen.adapters.bench import machine
from corogen.adapters.bench.cancel import pool_problems
from corogen.adapters.bench.chaos import Say, answers, ask_about, opened_and_closed, still_open, with_faults
from corogen.adapters.bench.crowd import Outcome
from corogen.adapters.bench.engines import Opener
from corogen.adapters.bench.killer import Killer
from corogen.adapters.bench.leaks import Holdings, MemoryLine
from corogen.adapters.bench.questions import Job, make_jobs
from corogen.adapters.bench.tally import Tally

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

#: different questions; they are asked again and again
_QUESTIONS = 50

#: lines about the progress in one run
_LINES = 30

#: looks at the memory between two lines
_LOOKS = 10


class Settings(NamedTuple):
    """How long, and what happens meanwhile."""

    minutes: float = 30.0
    #: seconds from the moment that the workers are ready until they are killed; every second fault of a scripted
    #: worker is an exception in a step
    kill_every_s: float = 5.0
    #: share of the requests whose caller leaves
    cancel_rate: float = 0.3
    #: requests under way at the same time
    at_once: int = 8
    #: longest answer, in tokens
    output_len: int = 24
    #: seconds without any end from which on what is outstanding counts as stuck
    patience_s: float = 300.0
    seed: int = 0


def measure(opener: Opener, settings: Settings, *, say: Say = lambda line: None) -> dict[str, Any]:
    """Ask until the time is over; returns a JSON-ready result: `lines` over the time, and `problems`."""
    found = opened_and_closed(opener, lambda pipe, killer: _with_pipe(pipe, killer, settings, say))
    return {"settings": settings._asdict(), **found}


def _with_pipe(pipe: Pipeline, killer: Killer, settings: Settings, say: Say) -> dict[str, Any]:
    questions = ask_about(pipe, _QUESTIONS, settings.output_len, settings.seed)
    start = time.perf_counter()
    tally = Tally(answers(pipe, questions))
    one_s = (time.perf_counter() - start) / len(questions) * settings.at_once
    opened = Holdings.now()
    jobs = make_jobs(questions, cancel_rate=settings.cancel_rate, leave_within_s=one_s, seed=settings.seed)
    diary = _Diary(pipe, killer, tally, settings.minutes * 60, say)
    stuck = with_faults(
        pipe, killer, _until(diary.end, jobs), diary.note,
        at_once=settings.at_once, kill_every_s=settings.kill_every_s, patience_s=settings.patience_s, errors_too=True,
    )  # fmt: skip
    diary.write()
    left = still_open(pipe, questions[0], opened)
    problems = [*tally.problems(stuck), *left.problems, *pool_problems(pipe), *diary.memory.problems()]
    return {
        "lines": diary.lines,
        **tally.figures(stuck),
        "kills": len(killer.deaths),
        "step_errors": killer.step_errors,
        "restarts": pipe.stats().restarts,
        "memory": diary.memory.figures(),
        "open": {"before": opened.figures(), **left.figures},
        "problems": problems,
    }


def _until(end: float, jobs: Iterator[Job]) -> Iterator[Job]:
    return takewhile(lambda job: time.monotonic() < end, jobs)


class _Diary:
    """Counts outcomes, and writes a line of figures from time to time."""

    def __init__(self, pipe: Pipeline, killer: Killer, tally: Tally, seconds: float, say: Say) -> None:
        self._pipe, self._killer, self._tally, self._say = pipe, killer, tally, say
        self._start = self._next_look = self._next_line = time.monotonic()
        self._every = seconds / _LINES
        self._next_line += self._every
        self.end = self._start + seconds
        self.memory = MemoryLine({"this process": None})
        self.lines: list[dict[str, Any]] = []

    def note(self, outcome: Outcome) -> None:
        """One request has ended."""
        self._tally.note(outcome)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self._every / _LOOKS
            self.memory.note(self._tally.total)
        if now >= self._next_line:
            self._next_line = now + self._every
            self.write()

    def write(self) -> None:
        """One line of figures."""
        stats = self._pipe.stats()
        line = {
            "minute": (time.monotonic() - self._start) / 60,
            **{kind: self._tally.counts[kind] for kind in ("answered", "cancelled", "failed", "different")},
            "kills": len(self._killer.deaths),
            "step_errors": self._killer.step_errors,
            "blocks_used": stats.blocks_used,
            "rss_mb": (machine.rss_bytes() or 0) / 1e6,
            "files": machine.open_files(),
        }
        self.lines.append(line)
        self._say(", ".join(f"{name} {_short(value)}" for name, value in line.items()))


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
