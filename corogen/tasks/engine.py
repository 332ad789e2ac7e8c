"""The engine of tasks: from a submitted task to its result, on one event loop, in coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from types import TracebackType

from corogen.errors import CorogenError, EngineClosed
from corogen.inbox import Inbox
from corogen.memory import give_back
from corogen.params import check_timeout
from corogen.restarts import Restarts
from corogen.startup import harmless
from corogen.tasks.batching import BatchManager
from corogen.tasks.flow import Flow
from corogen.tasks.room import Room
from corogen.tasks.task import Task, TaskStats
from corogen.wire.messages import StartPhase, TaskSpec
from corogen.workers.descriptors import fill_standard_streams
from corogen.workers.executor import TaskExecutor

logger = logging.getLogger("corogen.tasks")


class TaskEngine:
    """Serves one model on the event loop that starts it. `submit`, `cancel` and `stats` may come from any thread.

    Tasks are pure: one whose worker dies is computed again.

    Args:
        spec: what the workers build.
        executor: what computes.
        manager: makes batches; None: one task a batch.
        pipe_size: batches that wait at each pipeline stage beyond the one that it computes.
        queue_size: tasks outstanding at most; 0: no bound.
    """

    def __init__(
        self,
        spec: TaskSpec,
        executor: TaskExecutor,
        manager: BatchManager | None = None,
        *,
        pipe_size: int = 1,
        queue_size: int = 0,
    ) -> None:
        self._spec, self._executor = spec, executor
        self._room = Room(queue_size)
        self._restarts = Restarts(self._restart, on_back=self._back, on_fatal=self._give_up)
        self._flow = Flow(
            manager or BatchManager(), executor, self._room, self._restarts, stages=spec.pp, pipe_size=pipe_size
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: Inbox
        self._runner: asyncio.Task[None] | None = None
        self._released: asyncio.Task[None] | None = None
        self._pid = os.getpid()

    # ------------------------------------------------------------------ life

    async def start(self, progress: Callable[[StartPhase], None] | None = None) -> None:
        """Build the model and be ready for tasks. `progress` hears of each start-up phase.

        Raises:
            WorkerStartError: a worker failed; with its traceback.
            ModelError, ConfigError: raised by the model's function.
        """
        if self._loop is not None:
            raise EngineClosed("an engine starts once: make a new one")
        fill_standard_streams()
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._loop, self._look)
        self._room.connect(self._inbox, self._flow.add)
        self._executor.on_result, self._executor.on_failure = self._flow.answered, self._flow.workers_died
        try:
            ready = await self._executor.start(self._spec, harmless(progress or _log_phase))
        except BaseException:
            await self._release()
            raise
        self._runner = self._loop.create_task(self._run())
        self._room.open()
        logger.info("ready on %s", ready.device)

    async def _restart(self) -> None:
        await self._executor.close()
        await self._executor.start(self._spec, _log_phase)

    def _back(self) -> None:
        logger.warning("the workers are back (restart %d); tasks go on", self._restarts.count)
        self._flow.wake()

    async def _run(self) -> None:
        """Make batches and send them; if that ever fails, everybody learns of it at once."""
        try:
            await self._flow.run()
        except Exception as error:
            logger.exception("the engine's loop failed")
            failure = EngineClosed(f"the engine's loop failed: {error!r}")
            failure.__cause__ = error
            self._give_up(failure)

    def _give_up(self, error: CorogenError) -> None:
        """No batch will be computed any more."""
        self._room.refuse(error)
        self._flow.fail_all(error)

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Close the engine. Tasks that have not ended get EngineClosed, unless `drain` lets them finish first.

        Idempotent; calls may overlap, and one without `drain` ends the draining of another. `timeout_s` bounds it.

        Raises:
            InvalidRequest: `timeout_s` is no number of seconds.
        """
        check_timeout(timeout_s)
        if self._loop is None:
            return
        self._room.refuse(EngineClosed("the engine is closed"))
        if drain and self._released is None:
            await self._flow.drained(timeout_s)
        if self._released is None:
            self._released = self._loop.create_task(self._release())
        await asyncio.shield(self._released)

    async def _release(self) -> None:
        """Let go of everything; whoever waits gets an answer."""
        self._inbox.drain()
        self._flow.fail_all(EngineClosed("the engine was closed before the result was there"))
        await self._restarts.stop()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        await self._flow.stop()
        await self._executor.close()
        give_back()

    async def __aenter__(self) -> TaskEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------ from any thread

    def submit(self, task: Task, *, wait: bool = False) -> None:
        """Queue a task; its end is told to its sink. Never blocks; without room it waits outside with `wait`.

        Raises:
            QueueFullError: `queue_size` is reached.
            EngineClosed: the engine is not open, or belongs to the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise EngineClosed(f"the engine runs in process {self._pid}, from which this one was forked")
        self._room.add(task, wait=wait)

    def cancel(self, task: Task) -> None:
        """End a task; its sink gets RequestAborted. At any time, and more than once."""
        self._inbox.put(self._flow.cancel, task)
        with contextlib.suppress(EngineClosed):  # the loop is closed, and every task has ended
            self._inbox.ring()

    def check_open(self) -> None:
        """Raise EngineClosed unless tasks are taken."""
        self._room.check_open()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return self._executor.pids

    def stats(self) -> TaskStats:
        """A picture of this moment."""
        return self._flow.stats()

    def _look(self) -> None:
        """On the loop. Also while a hook waits: it may wait for more entries."""
        self._inbox.drain()
        self._flow.wake()


def _log_phase(phase: StartPhase) -> None:
    logger.debug("%s", phase)
