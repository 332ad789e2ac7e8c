"""A submitted task in its caller's hands."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Hashable, Iterator
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from corogen.adapters.portal import Mailbox, Portals, settled
from corogen.adapters.results import Results
from corogen.errors import RequestAborted, RequestTimeout
from corogen.params import check_timeout
from corogen.tasks.task import Task

if TYPE_CHECKING:
    from corogen.adapters.tasks import TaskThread


class TaskHandle(Future[Any]):
    """One submitted task: a `concurrent.futures.Future`, and awaitable on any asyncio, uvloop or trio loop.

    `cancel()` ends the task; so does cancelling who awaits it, if nobody else does. Reading the result frees the uid.
    Callbacks run in the engine's thread: they must be short.
    """

    def __init__(self, thread: TaskThread, results: Results, uid: Hashable, data: Any) -> None:
        super().__init__()
        #: the caller's name for the task
        self.uid = uid
        self._thread: TaskThread | None = thread
        self._results = results
        self._task: Task | None = Task(uid, data, self)
        #: done when there was room for the task
        self._entered: Future[None] = Future()
        self._lock = threading.RLock()
        self._readers = 0

    def submit(self, *, wait: bool = False) -> None:
        """Hand the task to the engine; see `TaskEngine.submit`."""
        thread, task = self._thread, self._task
        if thread is not None and task is not None:
            self._results.claim(self)
            try:
                thread.engine.submit(task, wait=wait)
            except BaseException:
                self._results.forget(self)
                raise

    # ------------------------------------------------------------------ for callers

    def result(self, timeout: float | None = None) -> Any:
        """Block until the result is there.

        Raises:
            RequestFailed, WorkerError, EngineClosed: there will be none.
            TimeoutError: it is not there after `timeout` seconds; the task goes on.
            BlockingCallError: on the engine's own loop.
        """
        self.refuse_blocking("TaskHandle.result")
        try:
            return super().result(timeout)
        finally:
            self._read()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, or None for a result; blocks as `result` does."""
        self.refuse_blocking("TaskHandle.exception")
        try:
            return super().exception(timeout)
        finally:
            self._read()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.wait().__await__()

    async def wait(self, timeout: float | None = None) -> Any:
        """`result` for coroutines. A timeout leaves the task alone; cancelling the last one who waits ends it.

        Raises what `result` raises; RequestAborted for a task that was cancelled.
        """
        check_timeout(timeout)
        with self._waiting():
            await self._settled(self, timeout)
        if not self.done():
            raise RequestTimeout(f"the task {self.uid!r} is not done after {timeout} s; it goes on")
        if self.cancelled():
            raise RequestAborted(f"the task {self.uid!r} was cancelled")
        return self.result(0)

    async def wait_for_room(self) -> None:
        """Until the task has entered the engine; cancelling it ends the task.

        Raises EngineClosed if the engine closes before.
        """
        with self._waiting():
            await self._settled(self._entered, None)
        self._entered.result(0)

    async def _settled(self, future: Future[Any], timeout: float | None) -> None:
        thread = self._thread
        if thread is None or future.done():
            return
        if timeout is None:
            await settled(thread.portals.current(), future)
            return
        import anyio

        with anyio.move_on_after(timeout):
            await settled(thread.portals.current(), future)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._lock:
            self._readers += 1
        try:
            yield
        except BaseException:
            with self._lock:
                alone = self._readers == 1
            if alone:
                self.cancel()
            raise
        finally:
            with self._lock:
                self._readers -= 1

    def cancel(self) -> bool:
        """End the task; False if it is done already."""
        with self._lock:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # waiters in wait() and as_completed() hear of it
            thread, task = self._thread, self._task
        self._results.forget(self)
        if thread is not None and task is not None:
            thread.engine.cancel(task)
        return True

    def running(self) -> bool:
        """Whether the task is under way, waiting for its turn included."""
        return not self.done()

    def refuse_blocking(self, what: str) -> None:
        """Raise BlockingCallError on the engine's own loop, unless the task is done."""
        thread = self._thread
        if thread is not None and not self.done():
            thread.refuse_blocking(what)

    def _read(self) -> None:
        if self.done():
            self._results.forget(self)

    # ------------------------------------------------------------------ for the engine, on its loop

    def entered(self) -> None:
        """There was room for it."""
        self._entered.set_result(None)

    def finish(self, result: Any) -> None:
        """Its result."""
        self._results.ended(self)
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            self.set_result(result)
        self._let_go()

    def fail(self, error: BaseException) -> None:
        """There will be none."""
        self._results.ended(self)
        if not self._entered.done():
            self._entered.set_exception(error)
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)
        self._let_go()

    def _let_go(self) -> None:
        """Of the input, and of the engine: a result that nobody reads must not keep it open."""
        self._task = self._thread = None


class Completed:
    """Handles in the order in which they end, once, for `for` or `async for`."""

    def __init__(self, handles: list[TaskHandle], portals: Portals) -> None:
        self._handles, self._portals = handles, portals
        self._left = len(handles)
        self._box: Mailbox | None = None

    def __iter__(self) -> Iterator[TaskHandle]:
        done: SimpleQueue[TaskHandle] = SimpleQueue()
        for handle in self._handles:
            handle.refuse_blocking("as_completed")
            handle.add_done_callback(done.put)  # type: ignore[arg-type]
        return (done.get() for _ in self._handles)

    def __aiter__(self) -> Completed:
        return self

    async def __anext__(self) -> TaskHandle:
        box = self._box or self._listen()
        if not self._left:
            raise StopAsyncIteration
        while not box.items:
            await box.signal.wait()
        self._left -= 1
        return box.items.popleft()  # type: ignore[no-any-return]

    def _listen(self) -> Mailbox:
        portal = self._portals.current()
        box = self._box = portal.mailbox()

        def tell(handle: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed
                portal.post(box.put, handle)

        for handle in self._handles:
            handle.add_done_callback(tell)
        return box
