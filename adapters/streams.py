"""Streams of pieces: for coroutines and for threads. Objects, not generators, so that leaving one is always noticed."""

from __future__ import annotations

import queue
from types import TracebackType
from typing import Any

from corogen.adapters.calls import Batch, Call
from corogen.adapters.loop_thread import EngineThread
from corogen.adapters.portal import Mailbox, Portal
from corogen.outputs import Response


class AsyncStream:
    """Pieces of one answer or, told apart by `index`, of many; an async iterator and async context manager.

    Read it on the loop on which it was made. Leaving the `async with`, `aclose()`, cancelling the reader inside it, or
    dropping the last reference (what a `break` does to a stream that has no name) aborts what still runs.
    """

    def __init__(self, thread: EngineThread, call: Call) -> None:
        portal = thread.portals.current()
        self._thread = thread
        self._box = portal.mailbox()
        self._batch = Batch(thread.engine, call, portal.outlet, self._box.put, pieces=True)
        start(self._batch, thread, call, portal, self._box)

    @property
    def request_ids(self) -> list[str]:
        """Ids for `Pipeline.abort`."""
        return self._batch.request_ids

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Response:
        """The next piece. Raises the request's error; StopAsyncIteration after the last piece."""
        batch, box = self._batch, self._box
        while batch.open:
            while not box.items:
                await box.signal.wait()
            piece = batch.receive(box.items.popleft())
            if piece is not None:
                return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort what still runs. At any time, any number of times, also while another task reads."""
        self._batch.abort()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batch.abort()

    def __del__(self) -> None:
        if hasattr(self, "_batch"):
            self._batch.abort()


class Stream:
    """Pieces of one answer or, told apart by `index`, of many; an iterator and context manager for one thread.

    Leaving the `with`, `close()` from any thread, or dropping the last reference aborts what still runs.
    """

    def __init__(self, thread: EngineThread, call: Call) -> None:
        thread.refuse_blocking("stream_infer")
        self._thread = thread
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._batch = Batch(thread.engine, call, thread.portals.direct, self._queue.put, pieces=True)
        self._batch.submit(self._queue.put)

    @property
    def request_ids(self) -> list[str]:
        """Ids for `Pipeline.abort`."""
        return self._batch.request_ids

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Response:
        """The next piece. Raises the request's error; StopIteration after the last piece.

        Raises:
            BlockingCallError: on the engine's own loop.
        """
        self._thread.refuse_blocking("stream_infer")
        batch = self._batch
        try:
            while batch.open:
                piece = batch.receive(self._queue.get())
                if piece is not None:
                    return piece
        except BaseException:  # Ctrl-C while waiting
            batch.abort()
            raise
        raise StopIteration

    def close(self) -> None:
        """Abort what still runs. From any thread, any number of times."""
        self._batch.abort()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batch.abort()

    def __del__(self) -> None:
        if hasattr(self, "_batch"):
            self._batch.abort()


def start(batch: Batch, thread: EngineThread, call: Call, portal: Portal, box: Mailbox) -> None:
    """Submit for a coroutine: here, or in the engine's pool if that would hold up the coroutine's loop."""
    if call.is_long(thread.engine):
        put = box.put
        batch.submit_in_pool(lambda item: portal.post(put, item))
    else:
        batch.submit(box.put)


def answer_all(thread: EngineThread, call: Call) -> list[Response]:
    """Block until every prompt of the call is answered; answers in order.

    Raises:
        BlockingCallError: on the engine's own loop.
        CorogenError: see `Batch.receive`.
    """
    return [*collect(thread, call, lambda done: None)]


def collect(thread: EngineThread, call: Call, on_answer: Any) -> list[Response]:
    """The same; `on_answer(response)` hears of each answer as it comes."""
    thread.refuse_blocking("infer")
    answers: list[Response | None] = [None] * len(call.prompts)
    box: queue.SimpleQueue[Any] = queue.SimpleQueue()
    batch = Batch(thread.engine, call, thread.portals.direct, box.put, pieces=False)
    try:
        batch.submit(box.put)
        while batch.open:
            answer = batch.receive(box.get())
            if answer is not None:
                answers[answer.index] = answer
                on_answer(answer)
    finally:
        batch.abort()
    return [answer for answer in answers if answer is not None]


async def collect_async(thread: EngineThread, call: Call) -> list[Response]:
    """The same for a coroutine. Cancelling it aborts what still runs."""
    portal = thread.portals.current()
    answers: list[Response | None] = [None] * len(call.prompts)
    box = portal.mailbox()
    batch = Batch(thread.engine, call, portal.outlet, box.put, pieces=False)
    try:
        start(batch, thread, call, portal, box)
        while batch.open:
            while not box.items:
                await box.signal.wait()
            answer = batch.receive(box.items.popleft())
            if answer is not None:
                answers[answer.index] = answer
    finally:
        batch.abort()
    return [answer for answer in answers if answer is not None]
