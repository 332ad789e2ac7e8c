"""Tasks in, batches out, results back: who is computed next, and what becomes of those that could not be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import Any

from corogen.errors import CorogenError, RequestAborted, RequestFailed, StepFailed, WorkerDied
from corogen.restarts import Restarts
from corogen.schedule.quarantine import Quarantine
from corogen.tasks import hooks, payload
from corogen.tasks.batching import BatchManager, SubmitEntry
from corogen.tasks.room import Room
from corogen.tasks.task import Batch, Task, TaskStats
from corogen.telemetry import REQUEST_BOUNDS, STEP_BOUNDS, Histogram
from corogen.wire.messages import TaskError, TaskInput, TaskOutput
from corogen.workers.executor import TaskExecutor

logger = logging.getLogger("corogen.tasks")


class Group:
    """Entries from which batches are made, and their tasks by uid."""

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self.tasks: dict[Hashable, Task] = {task.uid: task for task in tasks}
        self.queue: deque[SubmitEntry] = deque(task.entry for task in self.tasks.values())

    def remove(self, task: Task) -> None:
        """Take a task out, unless a hook has its entry at this moment."""
        with contextlib.suppress(ValueError):
            self.queue.remove(task.entry)
            del self.tasks[task.uid]


class Flow:
    """Everything between a task's entry and its end, on the engine's loop.

    At each of the workers' `stages` there are at most `pipe_size` batches beyond the one that it computes. Batches of
    which a worker died are sent again as they were, until their tasks are suspects and run alone. A batch that raised
    is halved, until the task that raises is alone.
    """

    def __init__(
        self,
        manager: BatchManager,
        executor: TaskExecutor,
        room: Room,
        restarts: Restarts,
        *,
        stages: int,
        pipe_size: int,
    ) -> None:
        self._manager, self._executor, self._room, self._restarts = manager, executor, room, restarts
        self._stages, self._depth = stages, stages * (pipe_size + 1)
        self._waiting = Group()
        #: to be computed before what waits: batches as they were, and tasks to be batched anew
        self._again: deque[Batch | Group] = deque()
        self._in_flight: dict[int, Batch] = {}
        self._step = 0
        self._quarantine = Quarantine()
        self._awake, self._idle = asyncio.Event(), asyncio.Event()
        self._hold: asyncio.TimerHandle | None = None
        self._splits: set[asyncio.Task[None]] = set()
        self._ended: Counter[str] = Counter()
        self._batches = self._batched_tasks = self._batches_seen = 0
        self._last_output = 0.0
        self._queue_time, self._batch_time = Histogram(REQUEST_BOUNDS), Histogram(STEP_BOUNDS)

    # ------------------------------------------------------------------ tasks come and go

    def wake(self) -> None:
        """Look again at the next turn."""
        self._awake.set()

    def add(self, task: Task) -> None:
        """A task that has room."""
        task.sink.entered()
        if task.ended:
            return
        if task.uid in self._waiting.tasks:  # or cancelled while an asynchronous hook had it
            self._fail([task], RequestFailed(f"another task with the uid {task.uid!r} waits for its batch"))
            return
        self._waiting.tasks[task.uid] = task
        self._waiting.queue.append(task.entry)

    def cancel(self, task: Task) -> None:
        """End a task; of one at the workers the result is dropped."""
        if not task.ended:
            self._waiting.remove(task)
            self._end(task, "cancelled")
            task.sink.fail(RequestAborted(f"the task {task.uid!r} was cancelled"))

    def fail_all(self, error: CorogenError) -> None:
        """Every task ends with `error`."""
        self._fail(reversed(self._room.tasks()), error)  # so that nobody comes in from outside meanwhile
        self._waiting = Group()
        self._again.clear()
        self._in_flight.clear()

    async def drained(self, timeout_s: float | None) -> None:
        """Until every task has ended, or `timeout_s` have passed."""
        self._idle.clear()
        if self._room.tasks():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def stop(self) -> None:
        """End what still runs here; every task has ended."""
        if self._hold is not None:
            self._hold.cancel()
        for split in self._splits:
            split.cancel()
        await asyncio.gather(*self._splits, return_exceptions=True)

    def _end(self, task: Task, how: str) -> None:
        """The one terminal transition."""
        task.ended = True
        self._ended[how] += 1
        if self._room.leave(task):
            self._idle.set()
        self._awake.set()  # a suspect's turn may have come

    def _fail(self, tasks: Iterable[Task], error: CorogenError) -> None:
        for task in tasks:
            if not task.ended:
                self._end(task, "failed")
                task.sink.fail(error)

    # ------------------------------------------------------------------ batches go out

    async def run(self) -> None:
        """Make batches and send them, until cancelled."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            while not self._restarts.under_way and len(self._in_flight) < self._depth:
                batch = await self._next()
                if batch is None:
                    break
                if self._restarts.under_way:  # since a hook was asked
                    self._again.append(batch)
                else:
                    self._send(batch)

    def _send(self, batch: Batch) -> None:
        self._step += 1
        batch.sent_at = time.monotonic()
        self._in_flight[self._step] = batch
        self._executor.submit(TaskInput(self._step, batch.body))

    async def _next(self) -> Batch | None:
        """What to compute now; None if there is nothing, or not yet."""
        while True:
            try:
                source = self._source()
                if source is None or isinstance(source, Batch):
                    return source
                batch = await self._make(source)
            except hooks.HookFailed as failure:
                logger.error("%s", failure.error)
                self._fail(failure.tasks, failure.error)
                continue
            if batch.open:
                return batch

    def _source(self) -> Batch | Group | None:
        """A suspect goes first, and alone; then what has to be computed again; then what waits."""
        suspect: Task | None = self._quarantine.alone
        if suspect is not None:
            return None if self._in_flight else Group([suspect])
        while self._again:
            first = self._again[0]
            if isinstance(first, Group):
                if first.queue:
                    return first
                self._again.popleft()
            else:
                self._again.popleft()
                if first.open:
                    return first
        return self._waiting if self._waiting.queue and not self._held() else None

    def _held(self) -> bool:
        """Whether the manager would rather wait for more tasks."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        seconds = hooks.hold(self._manager, self._waiting.queue, self._waiting.tasks)
        if seconds <= 0:
            return False
        self._hold = asyncio.get_running_loop().call_later(seconds, self.wake)
        return True

    async def _make(self, source: Group) -> Batch:
        """A batch of tasks of `source`. Raises HookFailed, also for an input that can not be sent."""
        tasks, batch, info = await hooks.make_batch(self._manager, source.queue, source.tasks)
        try:
            body = payload.encode(batch)
        except Exception as error:
            raise hooks.HookFailed(list(tasks.values()), hooks.failure("pickling the batch", error)) from error
        if source is self._waiting:
            now = time.monotonic()
            for task in tasks.values():
                self._queue_time.add(now - task.entry.arrival)
        return Batch(tasks, info, body)

    # ------------------------------------------------------------------ results come back

    def answered(self, answer: TaskOutput | TaskError) -> None:
        """From the workers: the oldest batch is computed, or it could not be."""
        batch = self._in_flight.pop(answer.step, None)
        if batch is None:
            return  # it was sent again meanwhile
        self._awake.set()
        if isinstance(answer, TaskError):
            self._raised(batch, answer)
            return
        self._note(batch)
        try:
            output = payload.decode(answer.body)
        except Exception as error:
            self._fail(batch.open, hooks.failure("taking the output apart", error))
            return
        self._split(batch, output)

    def _note(self, batch: Batch) -> None:
        began, self._last_output = max(batch.sent_at, self._last_output), time.monotonic()
        seconds, size = self._last_output - began, len(batch.tasks)
        self._batches += 1
        self._batched_tasks += size
        self._batch_time.add(seconds)
        if logger.isEnabledFor(logging.INFO):
            figures = {"batch_size": size, "duration_s": round(seconds, 5)}
            logger.info("batch size: %d, time: %.3f", size, seconds, extra=figures)

    def _split(self, batch: Batch, output: Any) -> None:
        try:
            parts = hooks.split_batch(self._manager, batch, output)
            if not hooks.is_asynchronous(parts):
                for uid, result in parts:
                    self._deliver(batch.tasks[uid], result)
                self._check_complete(batch)
                return
        except Exception as error:
            self._split_failed(batch, error)
            return
        job = asyncio.get_running_loop().create_task(self._split_slowly(batch, parts))
        self._splits.add(job)
        job.add_done_callback(self._splits.discard)

    async def _split_slowly(self, batch: Batch, parts: Any) -> None:
        try:
            async for uid, result in hooks.iterate(parts):
                self._deliver(batch.tasks[uid], result)
            self._check_complete(batch)
        except Exception as error:
            self._split_failed(batch, error)

    def _deliver(self, task: Task, result: Any) -> None:
        if not task.ended:
            self._end(task, "done")
            task.sink.finish(result)

    def _check_complete(self, batch: Batch) -> None:
        left = batch.open
        if left:
            self._fail(left, RequestFailed(f"split_batch gave no result for {[task.uid for task in left]}"))

    def _split_failed(self, batch: Batch, error: Exception) -> None:
        failure = hooks.failure("split_batch", error)
        logger.error("%s", failure)
        self._fail(batch.open, failure)

    # ------------------------------------------------------------------ faults

    def _raised(self, batch: Batch, answer: TaskError) -> None:
        """The model raised. It may be the doing of one task, or of all being too much together."""
        error = StepFailed(f"the model raised:\n{answer.traceback}")
        with contextlib.suppress(Exception):  # not every exception can be pickled, or found here
            error.__cause__ = payload.decode(answer.body)
        if "CUDA error" in answer.traceback:  # nothing on this device works any more
            self._in_flight[answer.step] = batch
            self.workers_died(error)
            return
        tasks = batch.open
        if len(tasks) > 1:
            middle = len(tasks) // 2
            self._again.extendleft([Group(tasks[middle:]), Group(tasks[:middle])])
        else:
            logger.error("%s", error)
            self._fail(tasks, error)

    def workers_died(self, error: CorogenError) -> None:
        """No batch in flight will be answered: they are computed again once the workers are back."""
        logger.error("%s", error)
        if self._room.refusing and not self._room.tasks():
            return
        computed = self._blame(error)
        progressed = self._batches > self._batches_seen
        self._batches_seen = self._batches
        self._restarts.died(error, progressed=progressed, at_work=bool(computed))

    def _blame(self, error: CorogenError) -> list[Task]:
        """Returns the tasks that may have been what was computed."""
        lost = [self._in_flight[step] for step in sorted(self._in_flight)]
        self._in_flight.clear()
        at_work = lost[:1] if self._stages == 1 else lost
        computed = [task for batch in at_work for task in batch.open]
        killed = isinstance(error, WorkerDied) and error.exit_code == -signal.SIGKILL
        culprit: Task | None = self._quarantine.died(computed, killed=killed)
        if culprit is not None:
            self._fail([culprit], error)
        self._again.extendleft(reversed([self._without_suspects(batch) for batch in lost]))
        return computed

    def _without_suspects(self, batch: Batch) -> Batch | Group:
        tasks = batch.open
        others = [task for task in tasks if task not in self._quarantine]
        return batch if len(others) == len(batch.tasks) else Group(others)

    # ------------------------------------------------------------------ figures

    def stats(self) -> TaskStats:
        """A picture of this moment, from any thread."""
        return TaskStats(
            waiting=len(self._waiting.queue),
            outside=self._room.num_outside,
            in_flight=len(self._in_flight),
            batches=self._batches,
            batched_tasks=self._batched_tasks,
            ended=dict(self._ended),
            restarts=self._restarts.count,
            queue_time=self._queue_time.times(),
            batch_time=self._batch_time.times(),
        )
