"""Workers that are killed and callers that leave, while every answer must be the one that comes without faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from corogen.adapters.bench.crowd import Crowd, Outcome
from corogen.adapters.bench.engines import Opener
from corogen.adapters.bench.figures import percentile
from corogen.adapters.bench.killer import Death, Killer
from corogen.adapters.bench.leaks import Holdings
from corogen.adapters.bench.questions import Job, Question, make_jobs, make_questions
from corogen.adapters.bench.tally import Tally, first_difference
from corogen.errors import ConfigError
from corogen.outputs import Response

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

Say = Callable[[str], None]

#: seconds between two lines about the progress
_LINE_EVERY_S = 10.0


class Settings(NamedTuple):
    """What happens to the requests."""

    requests: int = 500
    #: seconds from the moment that the workers are ready until they are killed
    kill_every_s: float = 2.0
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
    """Ask everything once without faults, then again with them; returns a JSON-ready result.

    `problems` lists what must not be, and is empty if all is well: a request that failed without being at fault, got
    other tokens, or never ended; a block, thread, child or descriptor that is left.
    """
    found = opened_and_closed(opener, lambda pipe, killer: _with_pipe(pipe, killer, settings, say))
    return {"settings": settings._asdict(), **found}


def opened_and_closed(opener: Opener, run: Callable[[Pipeline, Killer], dict[str, Any]]) -> dict[str, Any]:
    """What `run` found with a pipeline that is open for it alone; what is left after its close is a problem, too."""
    with opener():  # what the first pipeline of a process leaves behind for good is no leak
        pass
    before = Holdings.now()
    with opener() as (pipe, killer):
        found = run(pipe, killer)
    after = Holdings.now(settle=before)
    found["closed"] = {"before": before.figures(), "after": after.figures()}
    found["problems"] += [f"after the close: {line}" for line in after.leaked_since(before)]
    return found


def _with_pipe(pipe: Pipeline, killer: Killer, settings: Settings, say: Say) -> dict[str, Any]:
    questions = ask_about(pipe, settings.requests, settings.output_len, settings.seed)
    say(f"the answers to {len(questions)} requests without faults")
    start = time.perf_counter()
    expected = answers(pipe, questions)
    one_s = (time.perf_counter() - start) / len(questions) * settings.at_once
    opened = Holdings.now()
    tally = Tally(expected)
    jobs = make_jobs(questions, cancel_rate=settings.cancel_rate, leave_within_s=one_s, seed=settings.seed)
    say("the same with faults")
    start = time.perf_counter()
    stuck = with_faults(
        pipe, killer, islice(jobs, settings.requests), _Teller(tally, killer, say).note,
        at_once=settings.at_once, kill_every_s=settings.kill_every_s, patience_s=settings.patience_s,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    for difference in tally.differences:
        difference["asked_again"] = _asked_again(pipe, questions[difference["question"]], expected, difference)
    left = still_open(pipe, questions[0], opened)
    return {
        "seconds": seconds,
        **tally.figures(stuck),
        "kills": len(killer.deaths),
        "restarts": pipe.stats().restarts,
        "resume_s": resume_figures(killer.deaths),
        "preemptions": pipe.stats().preemptions,
        "open": {"before": opened.figures(), **left.figures},
        "problems": tally.problems(stuck) + left.problems,
    }


def ask_about(pipe: Pipeline, count: int, output_len: int, seed: int) -> list[Question]:
    """Questions in the ids of the pipeline's tokenizer. Raises ConfigError if it has none."""
    tokenizer = pipe.engine.admission.tokenizer
    if tokenizer is None:
        raise ConfigError("this measurement needs a model with a tokenizer")
    return make_questions(count, tokenizer.encode, output_len=output_len, seed=seed)


def answers(pipe: Pipeline, questions: Sequence[Question]) -> list[list[int]]:
    """The ids of every answer, all asked at once.

    Raises:
        CorogenError: a question failed, without any fault of the workers.
    """
    futures = [pipe.submit(question.prompt_ids, question.config) for question in questions]
    found: list[Response] = [future.result() for future in futures]
    return [answer.token_ids for answer in found]


def with_faults(
    pipe: Pipeline,
    killer: Killer,
    jobs: Iterator[Job],
    on_outcome: Callable[[Outcome], None],
    *,
    at_once: int,
    kill_every_s: float,
    patience_s: float,
    errors_too: bool = False,
) -> list[Job]:
    """Ask `jobs` while workers are killed, and wait until they are up again. Returns the stuck ones."""
    engine = pipe.engine
    with Crowd(pipe, at_once) as crowd:
        arm = killer.arm(kill_every_s, lambda: bool(engine.request_ids()), errors_too=errors_too)
        pipe.thread.run(arm)
        stuck = crowd.run(jobs, patience_s=patience_s, on_outcome=on_outcome)
        pipe.thread.run(killer.disarm(patience_s))
    return stuck


class _Teller:
    """Counts every outcome, and says a line from time to time."""

    def __init__(self, tally: Tally, killer: Killer, say: Say) -> None:
        self._tally, self._killer, self._say = tally, killer, say
        self._next = time.monotonic() + _LINE_EVERY_S

    def note(self, outcome: Outcome) -> None:
        self._tally.note(outcome)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self._tally.counts.items()))
            self._say(f"{counts}, {len(self._killer.deaths)} kills")


class Left(NamedTuple):
    """What a pipeline holds when nothing is asked any more."""

    figures: dict[str, Any]
    problems: list[str]


def still_open(pipe: Pipeline, question: Question, opened: Holdings) -> Left:
    """Ask once more, which proves that the engine serves and lets earlier steps end; then nothing may be in use.

    Threads are looked at after the close: the engine's loop keeps the one that waits for ended workers.
    """
    pipe.infer(question.prompt_ids, question.config)
    stats, now = pipe.stats(), Holdings.now()
    use = {"running": stats.running, "waiting": stats.waiting, "blocks_used": stats.blocks_used}
    problems = [f"{name} is {count} while nothing is asked" for name, count in use.items() if count]
    problems += [f"while open: {line}" for line in now._replace(threads=[]).leaked_since(opened)]
    return Left({"after": now.figures(), **use, "ended": stats.ended}, problems)


def _asked_again(
    pipe: Pipeline, question: Question, expected: Sequence[Sequence[int]], difference: dict[str, Any]
) -> str:
    """What the question gives alone and without faults: a near tie shows itself by the company that it had."""
    ids = pipe.infer(question.prompt_ids, question.config).token_ids
    place = first_difference(ids, expected[question.index], whole=True)
    if place is None:
        return "as expected"
    return "other than expected, too" if place == difference["place"] else f"other than expected from {place} on"


def resume_figures(deaths: Sequence[Death]) -> dict[str, Any]:
    """Seconds from a kill to the first token of the new workers, and its two parts: median and longest."""
    seen = [figures for death in deaths if (figures := death.figures()) is not None]
    parts: dict[str, Any] = {
        name: {
            "p50": percentile([one[name] for one in seen], 50),
            "max": max((one[name] for one in seen), default=float("nan")),
        }
        for name in ("total", "restart", "prefill")
    }
    return {"measured": len(seen), **parts}
