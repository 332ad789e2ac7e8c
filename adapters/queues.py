"""A bridge for applications built on threads and queues. New code is better off with coroutines or futures."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from types import TracebackType
from typing import Any

from corogen.adapters.futures import ResponseFuture
from corogen.adapters.pipeline import Pipeline
from corogen.errors import CorogenError, EngineClosed, InvalidRequest
from corogen.outputs import Response
from corogen.params import GenerationConfig

Inbox = queue.Queue[Any] | queue.SimpleQueue[Any]

#: wakes a pair's thread; never seen by the application
_DONE, _STOP = object(), object()

#: seconds that removing a pair waits for its last answers to be handed over
_JOIN_S = 10.0


class QueueAdapter:
    """Serves pairs of queues: prompts in, responses (or the exceptions that took their place) out.

    An item is a prompt, or a tuple `(prompt, GenerationConfig)`. The requests of one inbox run concurrently, and
    their answers come out in the order in which they went in. Each pair has one daemon thread, which sleeps in
    `inbox.get()`; nothing is polled. A full outbox holds up its own pair and nobody else.
    """

    def __init__(self, pipe: Pipeline, gen_config: GenerationConfig | None = None) -> None:
        self._pipe, self._gen_config = pipe, gen_config
        self._pairs: dict[int, _Pair] = {}
        self._lock = threading.Lock()
        self._closed = False

    def add(self, inbox: Inbox, outbox: Inbox) -> None:
        """Serve a pair from now on. One inbox belongs to one pair; an outbox may be shared.

        Raises:
            InvalidRequest: not a FIFO queue of this process, or an inbox that is served already.
            EngineClosed: the adapter is closed.
        """
        for name, box in (("inbox", inbox), ("outbox", outbox)):
            if not isinstance(box, queue.Queue | queue.SimpleQueue) or isinstance(
                box, queue.PriorityQueue | queue.LifoQueue
            ):
                raise InvalidRequest(f"{name} must be a queue.Queue or queue.SimpleQueue, not {box!r}", param=name)
        with self._lock:
            if self._closed:
                raise EngineClosed("the queue adapter is closed")
            if id(inbox) in self._pairs:
                raise InvalidRequest("this inbox is served already", param="inbox")
            self._pairs[id(inbox)] = _Pair(self._pipe, self._gen_config, inbox, outbox)

    def remove(self, inbox: Inbox) -> None:
        """Stop serving a pair. What was put before is still answered; returns when it is handed over.

        Raises:
            InvalidRequest: no such pair.
        """
        with self._lock:
            pair = self._pairs.pop(id(inbox), None)
        if pair is None:
            raise InvalidRequest("this inbox is not served", param="inbox")
        pair.stop()
        pair.join()

    def close(self) -> None:
        """Remove every pair. Idempotent."""
        with self._lock:
            self._closed = True
            pairs, self._pairs = list(self._pairs.values()), {}
        for pair in pairs:
            pair.stop()
        for pair in pairs:
            pair.join()

    def __enter__(self) -> QueueAdapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Pair:
    """One inbox, one outbox, one thread.

    The thread sleeps in `inbox.get()`, so a finished answer must wake it there: the engine's thread puts `_DONE`
    into the inbox, at most one at a time. When the inbox is full the thread is awake anyway.
    """

    def __init__(self, pipe: Pipeline, gen_config: GenerationConfig | None, inbox: Inbox, outbox: Inbox) -> None:
        self._pipe, self._gen_config = pipe, gen_config
        self._inbox, self._outbox = inbox, outbox
        self._pending: deque[ResponseFuture | BaseException] = deque()
        self._lock = threading.Lock()
        self._wake_posted = False
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="corogen-queue", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No item that is put after this is served."""
        try:
            self._inbox.put(_STOP, timeout=_JOIN_S)
        except queue.Full:
            self._stopping = True

    def join(self) -> None:
        """Wait until the thread has handed over its last answer; bounded, for an outbox that nobody empties."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while not self._stopping:
            self._handle(self._inbox.get())
            self._deliver_finished()
        while self._wake_posted:  # leave nothing of ours in the application's queue
            self._handle(self._inbox.get())
        for entry in self._pending:
            self._deliver(entry)

    def _handle(self, item: Any) -> None:
        if item is _STOP or item is _DONE:
            self._task_done()
            with self._lock:
                self._stopping = self._stopping or item is _STOP
                self._wake_posted = self._wake_posted and item is not _DONE
        else:
            self._pending.append(self._submit(item))

    def _submit(self, item: Any) -> ResponseFuture | BaseException:
        try:
            prompt, config = self._split(item)
            future = self._pipe.submit(prompt, config)
        except CorogenError as error:
            return error
        future.add_done_callback(self._answered)
        return future

    def _split(self, item: Any) -> tuple[Any, GenerationConfig | None]:
        if not isinstance(item, tuple):
            return item, self._gen_config
        if len(item) != 2:
            raise InvalidRequest(f"an item is a prompt or (prompt, GenerationConfig), not a tuple of {len(item)}")
        return item[0], self._gen_config if item[1] is None else item[1]

    def _answered(self, future: Any) -> None:
        """Engine's thread: wake ours."""
        with self._lock:
            if self._stopping or self._wake_posted:
                return
            self._wake_posted = True
            try:
                self._inbox.put_nowait(_DONE)
            except queue.Full:
                self._wake_posted = False

    def _deliver_finished(self) -> None:
        while self._pending and (isinstance(self._pending[0], BaseException) or self._pending[0].done()):
            self._deliver(self._pending.popleft())

    def _deliver(self, entry: ResponseFuture | BaseException) -> None:
        self._outbox.put(entry if isinstance(entry, BaseException) else _outcome(entry))
        self._task_done()

    def _task_done(self) -> None:
        """Keep `inbox.join()` meaningful: an item is done when its answer is in the outbox."""
        if isinstance(self._inbox, queue.Queue):
            with contextlib.suppress(ValueError):  # the application counts for itself
                self._inbox.task_done()


def _outcome(future: ResponseFuture) -> Response | BaseException:
    try:
        return future.result()
    except BaseException as error:
        return error
