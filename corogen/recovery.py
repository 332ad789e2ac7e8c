"""What happens when a step or the workers fail: who is blamed, who resumes, when the workers start again."""

from __future__ import annotations

import asyncio
import enum
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from corogen.errors import CorogenError, StepFailed, WorkerDied, WorkerError
from corogen.schedule import Sequence
from corogen.step_loop import StepLoop

logger = logging.getLogger("corogen.engine")

#: consecutive starts whose workers completed no step and died at work before the engine gives up
MAX_RESTARTS = 5
#: pause before the second of them, in seconds; doubled for each that follows, up to the bound
_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 10.0
#: consecutive failing steps after which the workers themselves are suspect
_MAX_FAILED_STEPS = 8

_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")


class State(enum.Enum):
    """Where an engine stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


class Health(NamedTuple):
    """State of the engine, how often its workers were started again, and the last fault if there was one."""

    state: State
    restarts: int
    last_error: CorogenError | None


def health(recovery: Recovery | None, *, closed: bool, refusing: bool) -> Health:
    """How an engine stands that has not recovered from anything yet (None: it still starts), or has."""
    if recovery is None:
        return Health(State.CLOSED if closed else State.STARTING, 0, None)
    state = State.RESTARTING if recovery.restarting else State.READY
    if closed or refusing:
        state = State.CLOSED if closed else State.FAILED
    return Health(state, recovery.restarts, recovery.last_error)


class Recovery:
    """Keeps requests alive across faults: their tokens are known, so they are computed again and go on.

    With `resume` off, requests that ran during a fault end with its error; those that waited stay either way.

    Args:
        restart: ends the old workers and starts new ones.
        on_fatal: the workers can not be brought back; called once.
    """

    def __init__(
        self,
        steps: StepLoop,
        restart: Callable[[], Awaitable[None]],
        *,
        resume: bool,
        on_fatal: Callable[[CorogenError], None],
    ) -> None:
        self._steps, self._restart, self._resume, self._on_fatal = steps, restart, resume, on_fatal
        self._task: asyncio.Task[None] | None = None
        self._died_again: CorogenError | None = None
        self._steps_seen = self._failed_steps = 0
        #: starts since a step was last completed; and of those the ones whose workers died at work, or never lived
        self._starts = self._fruitless = 0
        self.restarts = 0
        self.last_error: CorogenError | None = None

    @property
    def restarting(self) -> bool:
        """Whether the workers are down."""
        return self._task is not None and not self._task.done()

    def step_failed(self, error: StepFailed, kind: str, computed: list[Sequence]) -> None:
        """A worker raised in a step and lives; `kind` is the exception's name."""
        self.last_error = error
        if kind in _OUT_OF_MEMORY and self._steps.scheduler.lower_budget():
            logger.warning("out of memory; from now on at most %d tokens a step", self._steps.scheduler.token_budget)
            self._steps.roll_back(contents_lost=False)
            return
        self._failed_steps = 1 if self._made_progress() else self._failed_steps + 1
        if "CUDA error" in str(error) or self._failed_steps > _MAX_FAILED_STEPS:
            self.workers_died(error, computed)
        else:
            self._blame(error, computed)

    def workers_died(self, error: CorogenError, computed: list[Sequence] | None = None) -> None:
        """No step in flight will be answered: start new workers. They died of `computed`, or of the oldest step."""
        self.last_error = error
        logger.error("%s", error)
        self._steps.apply_results()
        if self.restarting:
            self._died_again = error
            return
        computed = self._steps.computing() if computed is None else computed
        if self._made_progress():
            self._starts = self._fruitless = 0
        elif not computed:
            self._fruitless = 0  # they died at rest: no reason to give up, but one to be slower
        self._steps.suspended = True
        self._blame(error, computed)
        self._task = asyncio.get_running_loop().create_task(self._bring_back(error))

    async def stop(self) -> None:
        """Give up what is under way; for closing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _made_progress(self) -> bool:
        before, self._steps_seen = self._steps_seen, self._steps.steps
        return self._steps_seen > before

    def _blame(self, error: CorogenError, computed: list[Sequence]) -> None:
        """Steps in flight never count; decide what that means for the sequences that ran."""
        culprits: list[Sequence] = self._steps.roll_back(contents_lost=True)
        if self._resume:
            killed = isinstance(error, WorkerDied) and error.exit_code == -signal.SIGKILL
            culprit = self._steps.scheduler.quarantine.died(computed, killed=killed)
            culprits = [] if culprit is None else [culprit]
        for seq in culprits:
            self._steps.fail(seq, error)
        self._steps.wake()

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
        self.restarts += 1
        logger.warning("the workers are back (restart %d); %d requests go on", self.restarts, self._steps.num_active)
        self._steps.suspended = False
        self._steps.wake()
