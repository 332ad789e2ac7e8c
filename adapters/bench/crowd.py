"""Mixed callers at once: coroutines on a loop of their own, threads, futures and queues, some of which leave."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

from corogen.adapters.bench.questions import Job, Leave
from corogen.adapters.queues import QueueAdapter
from corogen.outputs import Response

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline
    from corogen.adapters.streams import AsyncStream

_PAIRS = 2

#: seconds that a thread of a caller gets to end
_END_S = 5.0

#: how a request ended whose caller walked away from it
LEFT = "left"


@dataclass
class Outcome:
    """How one job ended: "stop", "length", "abort", `LEFT`, or the exception; with the ids that its caller saw."""

    job: Job
    end: Any
    ids: list[int] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """ "answered", "cancelled" or "failed"."""
        if self.end in ("stop", "length"):
            return "answered"
        if self.job.leave is not None and self.end in (LEFT, "abort"):
            return "cancelled"
        return "failed"


class Crowd:
    """Asks jobs through the callers that they name, so many at a time, and tells how each ended."""

    def __init__(self, pipe: Pipeline, at_once: int) -> None:
        self._pipe, self._at_once = pipe, at_once
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._loop = _LoopThread()
        self._bridge = QueueAdapter(pipe)
        self._pairs = [_QueueCaller(self._bridge, self._outcomes.put) for _ in range(_PAIRS)]
        self._turn = 0

    def run(self, jobs: Iterator[Job], *, patience_s: float, on_outcome: Callable[[Outcome], None]) -> list[Job]:
        """Ask until `jobs` is exhausted and everything has ended.

        Returns:
            The stuck ones: those that were outstanding when nothing at all had ended for `patience_s`.
        """
        outstanding: dict[str, Job] = {}

        def ask(job: Job) -> None:
            outstanding[job.id] = job
            self._ask(job)

        for job in islice(jobs, self._at_once):
            ask(job)
        while outstanding:
            try:
                outcome = self._outcomes.get(timeout=patience_s)
            except queue.Empty:
                break
            del outstanding[outcome.job.id]
            on_outcome(outcome)
            for job in islice(jobs, 1):
                ask(job)
        return list(outstanding.values())

    def close(self) -> None:
        """End loop, threads and queues; requests that still run are left."""
        self._loop.close()
        self._bridge.close(timeout_s=1.0)
        for pair in self._pairs:
            pair.close()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ one job, by its caller

    def _ask(self, job: Job) -> None:
        match job.caller:
            case "stream":
                self._loop.start(self._in_task(job, self._read_stream))
            case "await":
                self._loop.start(self._in_task(job, self._await_answer))
            case "thread":
                threading.Thread(target=self._in_thread, args=(job,), name=f"caller-{job.id}", daemon=True).start()
            case "future":
                self._submit_future(job)
            case _:
                self._turn += 1
                self._pairs[self._turn % _PAIRS].put(job)

    def _abort(self, job: Job) -> None:
        """Twice: the second finds nothing any more."""
        self._pipe.abort(job.id)
        self._pipe.abort(job.id)

    async def _in_task(self, job: Job, read: Callable[[Job, list[int]], Coroutine[Any, Any, Any]]) -> None:
        """Read in a task of its own, which may be cancelled before it has run at all."""
        ids: list[int] = []
        task = asyncio.create_task(read(job, ids))
        leave = job.leave
        if leave is not None and leave.how == "task.cancel":
            self._by_the_clock(leave, task.cancel)
        elif leave is not None and job.caller == "await":
            self._by_the_clock(leave, partial(self._abort, job))
        try:
            self._outcomes.put(Outcome(job, await task, ids))
        except asyncio.CancelledError:
            self._outcomes.put(Outcome(job, LEFT, ids))
        except Exception as error:
            self._outcomes.put(Outcome(job, error, ids))

    def _by_the_clock(self, leave: Leave, call: Callable[[], Any]) -> None:
        if leave.after_s:
            self._loop.later(leave.after_s, call)
        else:
            call()

    async def _await_answer(self, job: Job, ids: list[int]) -> Any:
        question = job.question
        answer = await self._pipe.async_batch_infer(question.prompt_ids, question.config, request_id=job.id)
        ids += answer.token_ids
        return answer.finish_reason

    async def _read_stream(self, job: Job, ids: list[int]) -> Any:
        question = job.question
        reader = _Reader(job, ids, partial(self._abort, job))
        stream = self._pipe.async_stream_infer(question.prompt_ids, question.config, request_id=job.id)
        if job.leave is not None and job.leave.how == "aclose":
            async with stream:
                return await _read_on(reader, stream)
        return await _read_on(reader, stream)

    def _in_thread(self, job: Job) -> None:
        ids: list[int] = []
        try:
            self._outcomes.put(Outcome(job, self._read_in_thread(job, ids), ids))
        except Exception as error:
            self._outcomes.put(Outcome(job, error, ids))

    def _read_in_thread(self, job: Job, ids: list[int]) -> Any:
        """`break` leaves the stream to the collector; `close` comes from another thread while this one reads."""
        question = job.question
        stream = self._pipe.stream_infer(question.prompt_ids, question.config, request_id=job.id)
        closes = job.leave is not None and job.leave.how == "close"
        close = partial(self._loop.later, 0.0, stream.close) if closes else partial(self._abort, job)
        reader = _Reader(job, ids, close)
        if reader.leaves_at_once():
            return LEFT
        for piece in stream:
            if reader.take(piece):
                return LEFT
        return reader.end

    def _submit_future(self, job: Job) -> None:
        question = job.question
        try:
            future = self._pipe.submit(question.prompt_ids, question.config, request_id=job.id)
        except Exception as error:
            self._outcomes.put(Outcome(job, error))
            return
        future.add_done_callback(lambda done: self._outcomes.put(_of_future(job, done)))
        if job.leave is not None:
            call = future.cancel if job.leave.how == "Future.cancel" else partial(self._abort, job)
            self._by_the_clock(job.leave, call)


class _Reader:
    """One reader of pieces: notes them, and knows when to leave.

    Args:
        act: leaves without walking away, so that the stream's own end is read: an abort, a close.
    """

    def __init__(self, job: Job, ids: list[int], act: Callable[[], Any]) -> None:
        self._leave, self._ids, self._act = job.leave, ids, act
        self._count = 0
        self.end: Any = None

    def leaves_at_once(self) -> bool:
        """Whether the caller walks away before the first piece."""
        return self._moment(0)

    def take(self, piece: Response) -> bool:
        """Note a piece; whether the caller walks away now."""
        self._ids += piece.token_ids
        self._count += 1
        self.end = piece.finish_reason
        return self.end is None and self._moment(self._count)

    def _moment(self, count: int) -> bool:
        leave = self._leave
        if leave is None or leave.how == "task.cancel" or count != leave.pieces:
            return False
        if leave.how in ("break", "aclose"):
            return True
        self._act()
        return False


async def _read_on(reader: _Reader, stream: AsyncStream) -> Any:
    if reader.leaves_at_once():
        return LEFT
    async for piece in stream:
        if reader.take(piece):
            return LEFT
    return reader.end


def _of_future(job: Job, done: Future[Any]) -> Outcome:
    if done.cancelled():
        return Outcome(job, LEFT)
    error = done.exception()
    return Outcome(job, error) if error is not None else _of_answer(job, done.result())


def _of_answer(job: Job, answer: Response) -> Outcome:
    return Outcome(job, answer.finish_reason, list(answer.token_ids))


class _QueueCaller:
    """One pair of queues, and a thread that takes the answers; they come in the order of the items."""

    def __init__(self, bridge: QueueAdapter, put: Callable[[Outcome], None]) -> None:
        self._put_outcome = put
        self._inbox: queue.Queue[Any] = queue.Queue()
        self._outbox: queue.Queue[Any] = queue.Queue()
        self._asked: deque[Job] = deque()
        self._thread = threading.Thread(target=self._read, name="caller-queue", daemon=True)
        self._thread.start()
        bridge.add(self._inbox, self._outbox)

    def put(self, job: Job) -> None:
        """Ask."""
        self._asked.append(job)
        self._inbox.put((job.question.prompt_ids, job.question.config))

    def close(self) -> None:
        """End the thread; the bridge is closed already."""
        self._outbox.put(None)
        self._thread.join(_END_S)

    def _read(self) -> None:
        while (answer := self._outbox.get()) is not None:
            job = self._asked.popleft()
            self._put_outcome(Outcome(job, answer) if isinstance(answer, Exception) else _of_answer(job, answer))


class _LoopThread:
    """An event loop in a thread, for callers that are coroutines."""

    def __init__(self) -> None:
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._live(),), name="caller-loop", daemon=True)
        self._thread.start()
        self._loop, self._leave = self._ready.result()

    async def _live(self) -> None:
        leave = asyncio.Event()
        self._ready.set_result((asyncio.get_running_loop(), leave))
        await leave.wait()

    def start(self, coro: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop, from any thread."""
        asyncio.run_coroutine_threadsafe(coro, self._loop)

    def later(self, seconds: float, call: Callable[[], Any]) -> None:
        """Call something on the loop in so many seconds, from any thread."""
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call)

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join(_END_S)
