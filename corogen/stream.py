"""From the engine to whoever reads: one merged slot per request, one wake-up per consumer context and step.

::

    engine thread                                      consumer (a loop, here or elsewhere; or a thread)
    ─────────────                                      ─────────────────────────────────────────────────
    Outgoing.push(text, id) ─ mark ─▶ Outlet
    end of step: Outlet.flush() ── one post ──────────▶ Outgoing.wake() ─▶ listener() ─▶ Outgoing.take() ─▶ Response

A consumer that lags finds larger pieces, never a longer queue. Responses are built by the consumer, so that the
engine's loop pays for two list appends a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from corogen.errors import InvalidRequest
from corogen.outputs import FinishReason, Response

if TYPE_CHECKING:
    from corogen.engine import Engine


class Outlet:
    """Collects the requests of one consumer context that have news, and posts them together.

    Args:
        post: runs `post(function, batch)` in the consumer's context, from the engine's thread; None: call it here.
        on_lost: gets the requests whose consumer context is gone (`post` raised RuntimeError).
    """

    __slots__ = ("_dirty", "_on_lost", "_post", "_register")

    def __init__(
        self,
        register: Callable[[Outlet], None],
        post: Callable[[Callable[[list[Outgoing]], None], list[Outgoing]], Any] | None = None,
        on_lost: Callable[[list[Outgoing]], None] = lambda batch: None,
    ) -> None:
        self._register, self._post, self._on_lost = register, post, on_lost
        self._dirty: list[Outgoing] = []

    def mark(self, out: Outgoing) -> None:
        """Engine thread: `out` has news."""
        if not self._dirty:
            self._register(self)
        self._dirty.append(out)

    def flush(self) -> None:
        """Engine thread, end of step: hand over everything that was marked."""
        batch, self._dirty = self._dirty, []
        if self._post is None:
            _wake_all(batch)
            return
        try:
            self._post(_wake_all, batch)
        except RuntimeError:  # the loop is closed, the trio run is over
            self._on_lost(batch)


def _wake_all(batch: list[Outgoing]) -> None:
    for out in batch:
        out.wake()


class Outgoing:
    """The merged slot of one request. The engine pushes, one consumer takes."""

    __slots__ = (
        "_cached",
        "_count",
        "_ended",
        "_error",
        "_finish",
        "_ids",
        "_marked",
        "_outlet",
        "_prompt_len",
        "_stop_reason",
        "_taken_end",
        "_texts",
        "index",
        "listener",
        "pieces",
        "request_id",
    )

    def __init__(self, outlet: Outlet, *, pieces: bool, index: int = 0, request_id: str = "") -> None:
        self._outlet = outlet
        self.request_id = request_id
        #: whether news are handed out as they come, or only with the end
        self.pieces = pieces
        self.index = index
        #: called in the consumer's context, with this object, when `take` may have something
        self.listener: Callable[[Outgoing], None] = _nobody
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._count = self._prompt_len = self._cached = 0
        self._marked = self._ended = self._taken_end = False
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: BaseException | None = None

    # ------------------------------------------------------------------ engine thread

    def began(self, prompt_len: int) -> None:
        """The request is admitted."""
        self._prompt_len = prompt_len

    def push(self, text: str, token_id: int) -> None:
        """One token; `text` is what it completed, which may be nothing."""
        self._ids.append(token_id)
        if text:
            self._texts.append(text)
            if not self._marked and self.pieces:
                self._marked = True
                self._outlet.mark(self)

    def end(self, text: str, reason: FinishReason, stop_reason: str | int | None, cached: int) -> None:
        """The last piece."""
        if text:
            self._texts.append(text)
        self._finish, self._stop_reason, self._cached = reason, stop_reason, cached
        self._close()

    def fail(self, error: BaseException) -> None:
        """The request ends with `error`; what was pushed before is still delivered first."""
        self._error = error
        self._close()

    def _close(self) -> None:
        if not self._ended:
            self._ended = True
            if not self._marked:
                self._marked = True
                self._outlet.mark(self)

    # ------------------------------------------------------------------ consumer's context

    def wake(self) -> None:
        """The outlet's post has arrived."""
        self._marked = False
        self.listener(self)

    @property
    def ended(self) -> bool:
        """Whether the engine has ended the request; the end may still wait to be taken."""
        return self._ended

    @property
    def finished(self) -> bool:
        """Whether the end has been taken."""
        return self._taken_end

    def take(self) -> Response | None:
        """Everything that is new as one response, or None. Raises the request's error, once, after its last piece."""
        ended = self._ended  # read before the buffers: what comes with the end is in them
        if self._taken_end:  # more wake-ups than news: an error is raised once
            return None
        if not ended and not (self.pieces and self._texts):
            return None
        texts, self._texts = self._texts, []
        ids, self._ids = self._ids, []
        if ended and self._error is not None and not (self.pieces and texts):
            self._taken_end = True
            raise _fresh(self._error)
        self._count += len(ids)
        piece = Response("".join(texts), self._count, self._prompt_len, None, ids, self.index, self._cached)
        if ended and self._error is None:
            self._taken_end = True
            piece.finish_reason, piece.stop_reason = self._finish, self._stop_reason
        return piece


def _nobody(out: Outgoing) -> None:
    pass


def _fresh(error: BaseException) -> BaseException:
    """An equal exception: one object must not collect the tracebacks of all who wait for the same engine."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def two_readers() -> InvalidRequest:
    """What the second of two concurrent readers gets."""
    return InvalidRequest("another task waits for the next piece of this stream: a stream has one reader")


class Signal:
    """Wakes the one coroutine that waits for news of a request, on an asyncio loop.

    The engine reaches the signal and never the stream, so that dropping the stream is noticed.
    """

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def set(self, out: Outgoing | None = None) -> None:
        """Wake the waiter, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Sleep until the next `set`."""
        if self._waiter is not None:
            raise two_readers()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class ResponseStream:
    """Pieces of one answer, for a coroutine on the engine's own loop.

    An async iterator and an async context manager. Leaving the `async with`, `aclose()`, or dropping the last
    reference aborts the request if it still runs.
    """

    def __init__(self, engine: Engine, out: Outgoing, request_id: str) -> None:
        self._engine, self._out = engine, out
        self.request_id = request_id
        self._signal = Signal()
        out.listener = self._signal.set

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Response:
        """The next piece. Raises the request's error; StopAsyncIteration after the last piece."""
        out = self._out
        while not out.finished:
            piece = out.take()
            if piece is not None:
                return piece
            await self._signal.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request unless it has ended. May be called at any time, also while another task waits."""
        self._abort()

    def _abort(self) -> None:
        if not self._out.finished:
            self._engine.abort(self.request_id)

    async def __aenter__(self) -> ResponseStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()

    def __del__(self) -> None:
        self._abort()
