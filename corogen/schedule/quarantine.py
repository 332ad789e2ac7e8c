"""Who may run after the workers died: suspects alone, one behind the other, until the culprit is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

#: deaths without a new token that make a sequence a suspect, and deaths while alone that make it the culprit
_SUSPECT_AFTER = 2
_GUILTY_AFTER = 2
#: the same where the workers were killed from outside, which is seldom an input's doing
_GUILTY_AFTER_KILLS = 3


class Suspect(Protocol):
    """What may be to blame: a sequence, or a task."""

    @property
    def ended(self) -> bool:
        """Whether it has its answer."""

    @property
    def progress(self) -> int:
        """Grows when the workers have done something for it."""


class Quarantine:
    """Finds the one input that takes the workers down, so that it alone fails.

    A death blames what the step held that was being computed. Whoever was there for two deaths without a new token in
    between is suspect. Suspects run alone in turn: a new token clears one, a second death convicts it.
    """

    def __init__(self) -> None:
        self._blame: dict[Any, tuple[int, int]] = {}  # deaths, and the progress at the last one
        self._suspects: list[Any] = []
        self._solo_deaths = 0

    @property
    def alone(self) -> Any | None:
        """What must run alone now, if there is a suspect."""
        while self._suspects and self._suspects[0].ended:
            self._next()
        return self._suspects[0] if self._suspects else None

    def died(self, computed: Iterable[Suspect], *, killed: bool = False) -> Any | None:
        """The workers died while `computed` was computed. Returns the culprit, once there is no doubt.

        `killed`: by a signal from outside.
        """
        computed = list(computed)
        if self.alone is not None and computed == [self.alone]:
            self._solo_deaths += 1
            return self.alone if self._solo_deaths >= (_GUILTY_AFTER_KILLS if killed else _GUILTY_AFTER) else None
        self._blame = {seq: blame for seq, blame in self._blame.items() if not seq.ended}
        self._blame |= {seq: self._deaths(seq) for seq in computed}
        known = set(self._suspects)
        self._suspects += [s for s in computed if self._blame[s][0] >= _SUSPECT_AFTER and s not in known]
        return None

    def __contains__(self, seq: Suspect) -> bool:
        """Whether `seq` is suspect."""
        return any(suspect is seq for suspect in self._suspects)

    def _deaths(self, seq: Suspect) -> tuple[int, int]:
        deaths, progress = self._blame.get(seq, (0, -1))
        return (deaths + 1 if progress == seq.progress else 1), seq.progress

    def progressed(self, seq: Suspect) -> None:
        """The workers have done something for `seq`."""
        if self._suspects and self._suspects[0] is seq:
            self._blame.pop(seq, None)
            self._next()

    def _next(self) -> None:
        self._suspects.pop(0)
        self._solo_deaths = 0
