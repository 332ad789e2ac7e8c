"""Requests that are all cancelled, at random points: memory must stay flat, and blocks come back at once."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from corogen.adapters.bench.chaos import Say, answers, ask_about, still_open
from corogen.adapters.bench.crowd import Crowd, Outcome
from corogen.adapters.bench.engines import Opener
from corogen.adapters.bench.killer import Killer
from corogen.adapters.bench.leaks import Holdings, MemoryLine
from corogen.adapters.bench.questions import make_jobs
from corogen.adapters.bench.tally import Tally
from corogen.params import GenerationConfig

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

#: different questions; they are asked again and again
_QUESTIONS = 50

#: measurements of memory in one run
_SAMPLES = 200

#: breaks whose blocks are watched
_PROBES = 20


class Settings(NamedTuple):
    """What is asked, and left."""

    #: asked until so many were cancelled; a caller that comes too late to leave counts as answered
    requests: int = 10_000
    #: requests under way at the same time
    at_once: int = 32
    #: longest answer, in tokens
    output_len: int = 64
    #: callers that leave by the clock do so within this time
    leave_within_s: float = 0.05
    #: seconds without any end from which on what is outstanding counts as stuck
    patience_s: float = 120.0
    seed: int = 0


def measure(opener: Opener, settings: Settings, *, say: Say = lambda line: None) -> dict[str, Any]:
    """Ask and leave; returns a JSON-ready result, with what must not be under `problems`."""
    with opener() as (pipe, killer):
        questions = ask_about(pipe, _QUESTIONS, settings.output_len, settings.seed)
        tally = Tally(answers(pipe, questions))
        say("blocks after a break")
        freed = pipe.thread.run(_probe_breaks(pipe, killer))
        opened = Holdings.now()
        jobs = make_jobs(questions, cancel_rate=1.0, leave_within_s=settings.leave_within_s, seed=settings.seed)
        watch = _Watch(tally, settings.requests, killer, say)
        say(f"{settings.requests} requests that are cancelled")
        with Crowd(pipe, settings.at_once) as crowd:
            jobs = takewhile(lambda job: tally.counts["cancelled"] < settings.requests, jobs)
            stuck = crowd.run(jobs, patience_s=settings.patience_s, on_outcome=watch.note)
        left = still_open(pipe, questions[0], opened)
        problems = [*tally.problems(stuck), *left.problems, *pool_problems(pipe), *watch.memory.problems()]
    return {
        "settings": settings._asdict(),
        **tally.figures(stuck),
        "memory": watch.memory.figures(),
        **freed,
        "open": {"before": opened.figures(), **left.figures},
        "problems": problems,
    }


class _Watch:
    """Counts outcomes, and looks at the memory of this process and its workers from time to time."""

    def __init__(self, tally: Tally, total: int, killer: Killer, say: Say) -> None:
        self._tally, self._total, self._say = tally, total, say
        self._every = max(1, total // _SAMPLES)
        workers = {f"worker {rank}": pid for rank, pid in enumerate(getattr(killer, "pids", []))}
        self.memory = MemoryLine({"this process": None, **workers})

    def note(self, outcome: Outcome) -> None:
        """One request has ended."""
        self._tally.note(outcome)
        done = self._tally.counts["cancelled"]
        if outcome.kind != "cancelled":
            return
        if done % self._every == 0:
            self.memory.note(self._tally.total)
        if done % (self._every * _SAMPLES // 5) == 0:
            self._say(f"{done} of {self._total}")


def pool_problems(pipe: Pipeline) -> list[str]:
    """What the scheduler's own check of blocks and slots says."""

    async def check() -> list[str]:
        try:
            pipe.engine.steps.scheduler.check()
        except RuntimeError as error:
            return [str(error)]
        return []

    return pipe.thread.run(check())


# ------------------------------------------------------------------ from a break to free blocks


async def _probe_breaks(pipe: Pipeline, killer: Killer) -> dict[str, Any]:
    """On the engine's loop: how many steps pass from a `break` to free blocks, of a request that runs alone.

    Steps that are under way at the break (the one that computes, and the one that is queued behind it) still write to
    its blocks, so that these come back with their results: `steps_under_way` counts them, `results_until_free` those
    that were waited for, `steps_planned_after` those that the request got although it had left.
    """
    found = [await _probe_break(pipe, killer, pieces) for pieces in range(1, _PROBES + 1)]
    names = ("steps_under_way", "results_until_free", "steps_planned_after")
    return {
        "break_to_free_blocks": {
            name: {"median": median(values), "max": max(values)}
            for name, values in zip(names, zip(*found, strict=True), strict=True)
        }
    }


async def _probe_break(pipe: Pipeline, killer: Killer, pieces: int) -> tuple[int, int, int]:
    engine = pipe.engine
    answered = _Counter()
    killer.on_answer = answered.add
    submitted = killer.submitted
    left = 0
    async for _ in engine.stream([5, 6, 7], GenerationConfig(max_new_tokens=None, ignore_eos=True)):
        left += 1
        if left == pieces:
            break
    under_way = killer.submitted - submitted - answered.count
    planned, results = killer.submitted, answered.count
    waited = 0
    while engine.stats().blocks_used:
        waited += 1
        await answered.reach(results + waited)
    killer.on_answer = lambda: None
    return under_way, waited, killer.submitted - planned


class _Counter:
    """Counts calls, and lets one coroutine wait until so many have taken effect."""

    def __init__(self) -> None:
        self.count = 0
        self._called = asyncio.Event()

    def add(self) -> None:
        """One more."""
        self.count += 1
        self._called.set()

    async def reach(self, count: int) -> None:
        """Sleep until the call of that number, and give the engine its turn behind it."""
        while self.count < count:
            self._called.clear()
            await self._called.wait()
        await asyncio.sleep(0)
