"""Engines over a scripted executor, and batch managers."""

import asyncio
import contextlib
import traceback

from corogen.adapters.tasks import AsyncEngine
from corogen.errors import WorkerDied
from corogen.tasks import payload
from corogen.tasks.batching import BatchManager, TaskEntry
from corogen.tasks.engine import TaskEngine
from corogen.tasks.runner import call
from corogen.wire.messages import TaskError, TaskOutput, TaskSpec, WorkerReady


class Dies(BaseException):
    """Raised by a scripted model: its worker is gone."""


class FakeTaskExecutor:
    """Computes batches in the engine's own thread, one a turn of the loop; `gate` holds them back."""

    def __init__(self, model=lambda x: x, *, exit_code=1, start_errors=()):
        self.model, self.exit_code = model, exit_code
        self.start_errors = list(start_errors)
        self.gate = None
        self.inputs = []
        self.starts = 0
        self._jobs = asyncio.Queue()
        self._worker = None

    async def start(self, spec, on_phase):
        self.starts += 1
        if self.starts > 1 and self.start_errors:
            raise self.start_errors.pop(0)
        self._jobs = asyncio.Queue()
        self._worker = asyncio.get_running_loop().create_task(self._work())
        return WorkerReady(0, 0, 0, "", "cpu", {})

    def submit(self, step):
        self._jobs.put_nowait(step)

    async def _work(self):
        while True:
            step = await self._jobs.get()
            if self.gate is not None:
                await self.gate.wait()
            batch = payload.decode(step.body)
            self.inputs.append(batch)
            try:
                answer = TaskOutput(step.step, payload.encode(call(self.model, batch)))
            except Dies:
                self.on_failure(WorkerDied(0, self.exit_code, "its last words"))
                return
            except Exception as error:
                answer = TaskError(step.step, traceback.format_exc(), type(error).__name__, payload.encode(error))
            self.on_result(answer)

    async def close(self):
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)


@contextlib.contextmanager
def scripted(model=lambda x: x, manager=None, *, executor=None, result_ttl_s=3600.0, **options):
    """An engine, and its executor as `engine.executor`; nothing may be left in it at the end."""
    executor = executor or FakeTaskExecutor(model)
    core = TaskEngine(TaskSpec(b"", []), executor, manager, **options)
    engine = AsyncEngine(core, result_ttl_s=result_ttl_s)
    engine.executor = executor
    try:
        yield engine
    finally:
        engine.shutdown()
        assert not core._room.tasks()
        assert engine.stats().waiting == engine.stats().in_flight == 0


def close_gate(engine):
    """Batches stay at the workers until `open_gate`."""
    engine.executor.gate = asyncio.Event()


def open_gate(engine):
    engine.thread.loop.call_soon_threadsafe(engine.executor.gate.set)


class Lists(BatchManager):
    """Up to `size` tasks a batch; the batch is one list."""

    def __init__(self, size=4):
        self.size = size

    def make_batch(self, q):
        entries = [q.popleft() for _ in range(min(self.size, len(q)))]
        return TaskEntry(tuple(e.uid for e in entries), ([e.data for e in entries],)), {"count": len(entries)}

    def split_batch(self, task_entry, count):
        assert len(task_entry.uids) == count
        return zip(task_entry.uids, task_entry.batch, strict=True)
