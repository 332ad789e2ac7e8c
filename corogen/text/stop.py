"""Stop strings: the text that may be sent now, and the text that must wait because a stop string may begin in it."""

from __future__ import annotations


class StopMatcher:
    """Looks for stop strings in a text that comes in pieces. The result does not depend on where the pieces are cut.

    The stop string that completes first wins; of several that complete at the same character, the longest. Kept back
    is the longest end of the text that is the beginning of some stop string, and never more.
    """

    __slots__ = ("_failures", "_first", "_held", "_include", "_matched", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        #: longest first, so that the first to complete at a character is the one that began first
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._failures = [_failure_table(stop) for stop in self._stops]
        #: how much of each stop string the text ends with
        self._states = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what may be sent now and the stop string that completed, if one did.

        After a match there is nothing more: every later call returns ("", None).
        """
        if self._matched:
            return "", None
        if not self._held and self._first.isdisjoint(text):
            return text, None
        return self._scan(text)

    def _scan(self, text: str) -> tuple[str, str | None]:
        whole, base = self._held + text, len(self._held)
        for end, char in enumerate(text, start=base + 1):
            stop = self._advance(char)
            if stop is not None:
                self._matched, self._held = True, ""
                return whole[: end if self._include else end - len(stop)], stop
        safe = len(whole) - max(self._states)
        self._held = whole[safe:]
        return whole[:safe], None

    def _advance(self, char: str) -> str | None:
        """One step of Knuth, Morris and Pratt for every stop string."""
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = self._failures[i][state - 1]
            if stop[state] == char:
                state += 1
                if state == len(stop):
                    return stop
            self._states[i] = state
        return None

    def flush(self) -> str:
        """Return the text that was kept back, when the answer ends for another reason."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper end that is also its beginning."""
    table, length = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table
