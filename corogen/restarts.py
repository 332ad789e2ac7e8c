"""Workers that died are started again: at once the first time, then ever slower, and not without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from corogen.errors import CorogenError, WorkerError

#: consecutive starts whose workers completed nothing and died at work before the engine gives up
MAX_RESTARTS = 5
#: pause before the second of them, in seconds; doubled for each that follows, up to the bound
_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 10.0


class Restarts:
    """Starts the workers again after each death, with back-off and a bound.

    Args:
        restart: ends the old workers and starts new ones.
        on_back: the workers are there again.
        on_fatal: they can not be brought back; called once.
    """

    def __init__(
        self,
        restart: Callable[[], Awaitable[None]],
        *,
        on_back: Callable[[], None],
        on_fatal: Callable[[CorogenError], None],
    ) -> None:
        self._restart, self._on_back, self._on_fatal = restart, on_back, on_fatal
        self._task: asyncio.Task[None] | None = None
        self._died_again: CorogenError | None = None
        #: starts since something was last completed; of those the ones whose workers died at work, or never lived
        self._starts = self._fruitless = 0
        #: how often the workers came back
        self.count = 0

    @property
    def under_way(self) -> bool:
        """Whether the workers are down."""
        return self._task is not None and not self._task.done()

    def died(self, error: CorogenError, *, progressed: bool, at_work: bool) -> None:
        """The workers died: since the last death they `progressed`, or not; and they were `at_work`, or at rest."""
        if self.under_way:
            self._died_again = error
            return
        if progressed:
            self._starts = self._fruitless = 0
        elif not at_work:
            self._fruitless = 0  # no reason to give up, but one to be slower
        self._task = asyncio.get_running_loop().create_task(self._bring_back(error))

    async def stop(self) -> None:
        """Give up what is under way; for closing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _bring_back(self, error: CorogenError) -> None:
        while True:
            self._starts += 1
            self._fruitless += 1
            if self._fruitless > MAX_RESTARTS:
                self._on_fatal(error)
                return
            if self._starts > 1:
                await asyncio.sleep(min(_BACKOFF_S * 2 ** min(self._starts - 2, 16), _MAX_BACKOFF_S))
            self._died_again = None
            try:
                await self._restart()
            except WorkerError as failure:
                error = failure
            except CorogenError as failure:  # the model itself can not be loaded any more
                self._on_fatal(failure)
                return
            else:
                if self._died_again is None:
                    break
                error = self._died_again
        self.count += 1
        self._on_back()
