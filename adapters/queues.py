"""For applications whose threads talk through queues: requests in on one queue, answers out on another."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from corogen.adapters.pipeline import Pipeline
from corogen.errors import EngineClosed, InvalidRequest, RequestAborted, a_type_of
from corogen.params import GenerationConfig

if TYPE_CHECKING:
    from corogen.adapters.futures import RequestFuture

_keys = itertools.count(1)

#: seconds that a writer has to empty itself into its outbox once its last answer is there
_FLUSH_S = 5.0


class AnyQueue(Protocol):
    """What the adapter needs of a queue: `queue.Queue` and `queue.SimpleQueue` have it."""

    def get(self) -> Any:
        """Block until there is an item."""

    def put(self, item: Any, /) -> Any:
        """Add an item; may block while the queue is full."""


class QueueAdapter:
    """Answers what is put into queues. For legacy threads; in new code await the pipeline.

    ::

        bridge = QueueAdapter(pipe)
        bridge.add(inbox, outbox)
        inbox.put("Hakuna Matata"); print(outbox.get().text)

    An item is a prompt, or a pair of a prompt and a `GenerationConfig`. For each item the outbox gets its `Response`,
    or the exception, in the order of the items; the requests of one inbox run at the same time. Nothing polls: each
    pair has a thread that sleeps in `inbox.get()`, and one that carries answers to the outbox, so that a full outbox
    holds up nobody else. Where the inbox has `task_done`, it is called once the answer is in the outbox.

    Args:
        gen_config: for items that bring none.

    Raises:
        InvalidRequest: an argument is of another type.
    """

    def __init__(self, pipe: Pipeline, gen_config: GenerationConfig | None = None) -> None:
        if not isinstance(pipe, Pipeline):
            raise InvalidRequest(f"pipe must be a Pipeline, as pipeline(...) returns it, not {pipe!r}", param="pipe")
        if gen_config is not None and not isinstance(gen_config, GenerationConfig):
            raise InvalidRequest(f"gen_config must be a GenerationConfig, not {gen_config!r}", param="gen_config")
        self._pipe, self._gen_config = pipe, gen_config
        self._lock = threading.Lock()
        self._pairs: dict[int, _Pair] = {}
        self._closed = False

    def add(self, inbox: AnyQueue, outbox: AnyQueue) -> None:
        """Serve a pair of queues from now on.

        Raises:
            InvalidRequest: the inbox is served already, or one of the two is no queue.
            EngineClosed: the adapter or the pipeline is closed.
        """
        _check_queue(inbox, "inbox")
        _check_queue(outbox, "outbox")
        self._pipe.engine.check_open()
        with self._lock:
            if self._closed:
                raise EngineClosed("the queue adapter is closed")
            if id(inbox) in self._pairs:
                raise InvalidRequest("this inbox is served already: one outbox for each inbox", param="inbox")
            self._pairs[id(inbox)] = pair = _Pair(self._pipe, self._gen_config, inbox, outbox)
        pair.start()

    def remove(self, inbox: AnyQueue) -> None:
        """Stop serving an inbox. What lies in it already is still answered. Unknown inboxes are fine."""
        with self._lock:
            pair = self._pairs.pop(id(inbox), None)
        if pair is not None:
            pair.stop()

    def close(self, *, timeout_s: float | None = 30.0) -> None:
        """Stop serving. Running requests are answered; after `timeout_s` they are aborted and what there is comes out.

        Items that nobody has taken from their inbox yet get EngineClosed. Idempotent.

        Raises:
            BlockingCallError: on the engine's own loop.
        """
        self._pipe.thread.refuse_blocking("QueueAdapter.close")
        pairs = self._leave()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for pair in pairs:
            pair.join(None if end is None else max(0.0, end - time.monotonic()))
        for pair in pairs:
            pair.abort()
        for pair in pairs:
            pair.join(_FLUSH_S)

    def _leave(self) -> list[_Pair]:
        with self._lock:
            self._closed = True
            pairs = list(self._pairs.values())
            self._pairs.clear()
        for pair in pairs:
            pair.refuse()
            pair.stop()
        return pairs

    def __enter__(self) -> QueueAdapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Stop:
    """The private item that wakes the reader of one pair, and no other's."""

    key: int


#: the end of an inbox that was too full for its _Stop
_NOTHING = object()


class _Pair:
    """One inbox, one outbox, two sleeping threads."""

    def __init__(self, pipe: Pipeline, gen_config: GenerationConfig | None, inbox: AnyQueue, outbox: AnyQueue) -> None:
        self._pipe, self._gen_config, self._inbox, self._outbox = pipe, gen_config, inbox, outbox
        self._stop = _Stop(next(_keys))
        self._refusing = False
        self._ending = threading.Lock()
        self._stopped = self._stop_posted = False
        self._running: set[RequestFuture] = set()
        #: futures and exceptions in the order of their items; None: the end
        self._accepted: queue.SimpleQueue[RequestFuture | BaseException | None] = queue.SimpleQueue()
        name = f"corogen-queue-{self._stop.key}"
        self._reader = threading.Thread(target=self._read, name=f"{name}-in", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}-out", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._reader.start()
        self._writer.start()

    def stop(self) -> None:
        """Wake the reader for the last time; what lies in the inbox already comes first. Does not wait for it."""
        with self._ending, contextlib.suppress(Exception):  # full: the reader has no reason to sleep; or shut down
            self._stopped = True
            getattr(self._inbox, "put_nowait", self._inbox.put)(self._stop)
            self._stop_posted = True

    def refuse(self) -> None:
        """Answer with EngineClosed what is read from now on."""
        self._refusing = True
        self._pipe.engine.wake_waiters()

    def abort(self) -> None:
        """End the requests that still run."""
        for future in list(self._running):
            for request_id in future.request_ids:
                self._pipe.abort(request_id)

    def join(self, timeout_s: float | None) -> None:
        """Wait until the last answer is in the outbox."""
        self._writer.join(timeout_s)

    # ------------------------------------------------------------------ reader

    def _read(self) -> None:
        with contextlib.suppress(Exception):  # the inbox was shut down
            while (item := self._next()) is not _NOTHING and self._takes(item):
                pass
        self._accepted.put(None)

    def _next(self) -> Any:
        with self._ending:
            asleep = not self._stopped or self._stop_posted
        if asleep:
            return self._inbox.get()
        try:
            return self._inbox.get_nowait()  # type: ignore[attr-defined]  # the queue was full, so it has a bound
        except queue.Empty:
            return _NOTHING

    def _takes(self, item: Any) -> bool:
        """Submit an item; False if it is the end."""
        if not isinstance(item, _Stop):
            self._accepted.put(self._accept(item))
        elif item.key == self._stop.key:
            self._item_done()
            return False
        else:
            self._inbox.put(item)  # the reader of another adapter waits for it
            self._item_done()
        return True

    def _accept(self, item: Any) -> RequestFuture | BaseException:
        """The future of an item, or what is wrong with it."""
        try:
            prompt, config = _parts(item)
            # a full engine holds up this thread, and so those who fill the inbox
            self._pipe.engine.wait_for_room(lambda: self._refusing)
            if self._refusing:
                raise EngineClosed("the queue adapter was closed before this item was taken")
            future = self._pipe.submit(prompt, config or self._gen_config, when_full="wait")
        except Exception as error:
            return error
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    # ------------------------------------------------------------------ writer

    def _write(self) -> None:
        try:
            while (accepted := self._accepted.get()) is not None:
                self._outbox.put(_result(accepted))
                self._item_done()
        except Exception:  # the outbox was shut down: nobody wants the rest
            self.refuse()
            self.abort()

    def _item_done(self) -> None:
        """For those who wait in `Queue.join`."""
        done = getattr(self._inbox, "task_done", None)
        if done is not None:
            with contextlib.suppress(ValueError):  # somebody else counts, too
                done()


def _check_queue(value: Any, name: str) -> None:
    if not callable(getattr(value, "get", None)) or not callable(getattr(value, "put", None)):
        raise InvalidRequest(f"{name} must be a queue, with get and put, not {a_type_of(value)}", param=name)
    if inspect.iscoroutinefunction(value.get):
        raise InvalidRequest(
            f"{name} is an asyncio queue, which threads can not use: await pipe.async_batch_infer instead, or give a "
            "queue.Queue",
            param=name,
        )


#: what a prompt, or a message of one, can be
_PROMPTS = (str, list, tuple, Mapping)


def _parts(item: Any) -> tuple[Any, GenerationConfig | None]:
    """The prompt of an item, and the settings that it brings. Raises InvalidRequest for a pair of something else."""
    if not isinstance(item, tuple):
        return item, None
    if len(item) == 2 and isinstance(item[1], GenerationConfig | None):
        return item
    if item and isinstance(item[0], _PROMPTS) and not all(isinstance(part, _PROMPTS) for part in item):
        raise InvalidRequest(
            "an item is a prompt, or a pair of a prompt and a GenerationConfig; this one has "
            f"{len(item)} parts, of which the second is {a_type_of(item[1])}",
            param="gen_config",
        )
    return item, None


def _result(accepted: RequestFuture | BaseException) -> Any:
    """What the outbox gets: the answer, or the exception instead of it."""
    if isinstance(accepted, BaseException):
        return accepted
    try:
        return accepted.result()
    except CancelledError:
        return RequestAborted("the request was cancelled")
    except Exception as error:
        return error
