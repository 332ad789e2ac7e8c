"""Whether the engine lives: asked without ever waiting for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from corogen.errors import EngineClosed
from corogen.recovery import State

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline


class Pulse:
    """Knows how long the engine's loop has been deaf: each look leaves a knock there that it has to answer."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._knocked_at: float | None = None

    def state(self, stall_s: float) -> str:
        """The engine's state, or "stalled" when its loop has not answered a knock for `stall_s` seconds."""
        state = self._pipe.engine.health.state
        if state is State.READY and self._deaf_for() > stall_s:
            return "stalled"
        return state.value

    def _deaf_for(self) -> float:
        now = time.monotonic()
        if self._knocked_at is not None:
            return now - self._knocked_at
        self._knocked_at = now
        try:
            self._pipe.engine.loop.call_soon_threadsafe(self._answer)
        except (EngineClosed, RuntimeError):  # it has just ended
            self._knocked_at = None
        return 0.0

    def _answer(self) -> None:
        self._knocked_at = None
