"""Counts how requests ended, and compares what came with what must come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from corogen.adapters.bench.crowd import Outcome
from corogen.adapters.bench.questions import Job

#: differences and failures that are described; all are counted
_KEPT = 20


class Tally:
    """How requests ended. Every id that a caller saw must be the one of the answer without faults.

    Args:
        expected: the ids of each question's answer.
    """

    def __init__(self, expected: Sequence[Sequence[int]]) -> None:
        self._expected = expected
        self.counts: Counter[str] = Counter()
        self.differences: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.tokens = 0

    @property
    def total(self) -> int:
        """Requests that have ended."""
        return sum(self.counts[kind] for kind in ("answered", "cancelled", "failed"))

    def note(self, outcome: Outcome) -> None:
        """One request has ended."""
        kind = outcome.kind
        self.counts[kind] += 1
        self.tokens += len(outcome.ids)
        if kind == "failed":
            if len(self.failures) < _KEPT:
                self.failures.append(f"{outcome.job.words}: {outcome.end!r}")
            return
        expected = self._expected[outcome.job.question.index]
        place = first_difference(outcome.ids, expected, whole=kind == "answered")
        if place is not None:
            self.counts["different"] += 1
            if len(self.differences) < _KEPT:
                self.differences.append(_difference(outcome, expected, place))

    def figures(self, stuck: Sequence[Job]) -> dict[str, Any]:
        """JSON-ready."""
        kinds = ("answered", "cancelled", "failed", "different")
        return {
            **{kind: self.counts[kind] for kind in kinds},
            "stuck": len(stuck),
            "tokens": self.tokens,
            "differences": self.differences,
            "failures": self.failures,
            "stuck_requests": [job.words for job in stuck],
        }

    def problems(self, stuck: Sequence[Job]) -> list[str]:
        """What must not be, one sentence each."""
        bad = {"failed": self.counts["failed"], "different": self.counts["different"], "stuck": len(stuck)}
        return [f"{count} requests are {kind}" for kind, count in bad.items() if count]


def first_difference(ids: Sequence[int], expected: Sequence[int], *, whole: bool) -> int | None:
    """The first place where `ids` are not `expected`; with `whole` also a missing end. None if there is none."""
    for place, (a, b) in enumerate(zip(ids, expected, strict=False)):
        if a != b:
            return place
    if len(ids) > len(expected) or (whole and len(ids) < len(expected)):
        return min(len(ids), len(expected))
    return None


def _difference(outcome: Outcome, expected: Sequence[int], place: int) -> dict[str, Any]:
    return {
        "request": outcome.job.words,
        "question": outcome.job.question.index,
        "place": place,
        "expected": list(expected[place : place + 4]),
        "got": outcome.ids[place : place + 4],
    }
