"""What is asked while faults happen: questions with one right answer each, and who asks them and leaves how.

Everything here follows from a seed; only the moments at which things happen do not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from corogen.params import GenerationConfig

#: ways to leave, by kind of caller. Who asks through queues can not leave: an item in a queue is nobody's
WAYS_TO_LEAVE: dict[str, tuple[str, ...]] = {
    "stream": ("break", "aclose", "task.cancel", "abort"),
    "await": ("task.cancel", "abort"),
    "thread": ("break", "close", "abort"),
    "future": ("Future.cancel", "abort"),
    "queue": (),
}

#: share of the cancellations that come at once: before the request is submitted, or right behind
_AT_ONCE = 0.2

_CLAUSES = (
    "Tell me about {}",
    "and explain why it likes {}",
    "What would happen if somebody gave it {}?",
    "Answer in the words of {}.",
    "Once upon a time there was {}, which",
    "The three most important facts about {} are:",
)
_THINGS = ("the sea", "a blue horse", "old bread", "the moon", "a loud clock", "Paris", "seven keys", "the rain", "tea")


@dataclass(frozen=True)
class Question:
    """A prompt whose answer is determined: greedy, or sampled with a seed; always of its full length."""

    index: int
    prompt_ids: list[int]
    config: GenerationConfig


@dataclass(frozen=True)
class Leave:
    """How a caller leaves. Readers of pieces leave after `pieces` of them, the others after `after_s` seconds.

    0 of either is at once: before the first piece, or before a task has run at all.
    """

    how: str
    pieces: int
    after_s: float

    def __str__(self) -> str:
        return f"{self.how} after {self.pieces} pieces or {self.after_s:.2f} s"


@dataclass(frozen=True)
class Job:
    """One request: a question, who asks it, and how that caller leaves (None: reads to the end)."""

    id: str
    question: Question
    caller: str
    leave: Leave | None

    @property
    def words(self) -> str:
        """For a report."""
        left = f", {self.leave}" if self.leave else ""
        return f"request {self.id} (question {self.question.index}, {self.caller}{left})"


def make_questions(
    count: int, encode: Callable[[str], Sequence[int]], *, output_len: int, seed: int = 0
) -> list[Question]:
    """`count` different questions of a few to some dozen tokens, with answers of 2 to `output_len` tokens.

    Every second is greedy, the others sample with a seed of their own.
    """
    rng = random.Random(seed)
    return [Question(i, list(encode(_text(i, rng))), _config(i, output_len, rng)) for i in range(count)]


def _text(index: int, rng: random.Random) -> str:
    clauses = rng.choices(_CLAUSES, k=rng.randint(1, 3))
    return f"{index}. " + " ".join(clause.format(rng.choice(_THINGS)) for clause in clauses)


def _config(index: int, output_len: int, rng: random.Random) -> GenerationConfig:
    length = rng.randint(min(2, output_len), output_len)
    if index % 2 == 0:
        return GenerationConfig(max_new_tokens=length, ignore_eos=True)
    return GenerationConfig(
        max_new_tokens=length, ignore_eos=True, do_sample=True, temperature=0.8, random_seed=rng.randrange(2**31)
    )


def make_jobs(
    questions: Sequence[Question], *, cancel_rate: float, leave_within_s: float, seed: int = 0
) -> Iterator[Job]:
    """Each question in turn, again and again, without end; a share of `cancel_rate` is left before its end.

    Args:
        leave_within_s: callers that leave by the clock do so within this time.
    """
    rng = random.Random(seed)
    for number in itertools.count():
        question = questions[number % len(questions)]
        leave = None
        callers = [caller for caller, ways in WAYS_TO_LEAVE.items()]
        if rng.random() < cancel_rate:
            callers = [caller for caller in callers if WAYS_TO_LEAVE[caller]]
        caller = rng.choice(callers)
        if len(callers) < len(WAYS_TO_LEAVE):
            leave = _leave(caller, question, leave_within_s, rng)
        yield Job(f"job-{seed}-{number}", question, caller, leave)


def _leave(caller: str, question: Question, within_s: float, rng: random.Random) -> Leave:
    how = rng.choice(WAYS_TO_LEAVE[caller])
    if rng.random() < _AT_ONCE:
        return Leave(how, 0, 0.0)
    length = question.config.max_new_tokens
    last = length - 1 if isinstance(length, int) else 1
    return Leave(how, rng.randint(1, max(1, last)), rng.uniform(0.0, within_s))
