"""The dedicated engine thread: one event loop, one engine, commanded from any other thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from corogen.adapters.portal import MakeOutlet, Portals, inert_outlet, settled
from corogen.config import EngineConfig
from corogen.engine import Engine
from corogen.errors import BlockingCallError, EngineClosed
from corogen.params import check_timeout
from corogen.stream import Outgoing, Outlet
from corogen.text.tokenizer import Tokenizer
from corogen.wire.messages import StartPhase
from corogen.workers.descriptors import fill_standard_streams
from corogen.workers.executor import Executor

logger = logging.getLogger("corogen")

Result = TypeVar("Result")

#: seconds beyond its own bound that a close waits for engine and thread
_GRACE_S = 30.0


class Service(Protocol):
    """What a thread can own: an engine of whatever kind."""

    async def start(self, progress: Callable[[StartPhase], None] | None = None) -> None:
        """Be ready for requests."""

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """End; what still runs gets EngineClosed, unless `drain` lets it finish first. Idempotent."""


class LoopThread:
    """Owns a service on a loop of its own (uvloop where it is installed), in a daemon thread.

    The constructor returns when the service is ready and raises what its start raises; nothing is left behind then.
    Dropping the last reference closes the service, too. `progress` hears of the phases of the start, in the thread.
    """

    #: what to call where a blocking call is refused
    instead = "await its coroutines here"

    def __init__(
        self,
        service: Service,
        progress: Callable[[StartPhase], None] | None = None,
        make_outlet: MakeOutlet = inert_outlet,
    ) -> None:
        self._service = service
        self._control = _Control()
        # the target knows nothing of this object, so that dropping it is noticed
        self._thread = threading.Thread(
            target=_serve, args=(service, self._control, progress), name="corogen-engine", daemon=True
        )
        self._thread.start()
        try:
            self._control.ready.result()
        except BaseException:
            self._control.leave()
            self._thread.join(_GRACE_S)
            raise
        #: consumer contexts of this service
        self.portals = Portals(self.loop, make_outlet)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The service's loop, for `asyncio.run_coroutine_threadsafe`."""
        return self._control.loop

    @property
    def closed(self) -> bool:
        """Whether the thread has ended."""
        return self._control.ended.done()

    def refuse_blocking(self, what: str) -> None:
        """Raise BlockingCallError in the engine's own thread, where a blocking call would wait for itself."""
        if threading.get_ident() == self._thread.ident and not self.closed:
            raise BlockingCallError(
                f"{what} blocks, and this is the engine's own event loop, which has to answer it: {self.instead}, or "
                "call from another thread"
            )

    def run(self, coro: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the engine's loop and return its result; from any other thread.

        Raises:
            BlockingCallError: called in the engine's own thread, where it would wait for itself.
            EngineClosed: the loop has ended, or ends before the coroutine does.
        """
        try:
            self.refuse_blocking(f"{type(self).__name__}.run")
        except BlockingCallError:
            coro.close()
            raise
        future = self._start(coro)
        try:
            return future.result()
        except CancelledError:
            raise EngineClosed("the coroutine was cancelled: the engine's thread ends") from None
        except BaseException:
            future.cancel()
            raise

    def _start(self, coro: Coroutine[Any, Any, Result]) -> Future[Result]:
        return self._control.start(coro)

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Close the engine and end the thread. Idempotent, from any thread but the engine's own.

        Requests that still run get EngineClosed; with `drain` they may finish first, for `timeout_s` at most.

        Raises:
            BlockingCallError: in the engine's own thread.
            EngineClosed: engine or thread did not end within half a minute beyond `timeout_s`.
        """
        self.refuse_blocking("close")
        check_timeout(timeout_s)
        if self._control.foreign:
            return  # the thread belongs to the process that this one was forked from
        with contextlib.suppress(EngineClosed, CancelledError):
            closing = self._start(self._service.aclose(drain=drain, timeout_s=timeout_s))
            bound = None if drain and timeout_s is None else (timeout_s or 0.0) + _GRACE_S
            try:
                closing.result(bound)
            except TimeoutError:
                pass
            except KeyboardInterrupt:
                closing.cancel()  # a drain that is given up; whatever closes next need not wait for it
                raise
        self._end()

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """The same from a coroutine, on any loop but the engine's own: that loop goes on meanwhile."""
        self.refuse_blocking("aclose")
        check_timeout(timeout_s)
        if self._control.foreign:
            return
        with contextlib.suppress(EngineClosed):
            await settled(self.portals.current(), self._start(self._service.aclose(drain=drain, timeout_s=timeout_s)))
        self._control.leave()
        await settled(self.portals.current(), self._control.ended)
        self._end()

    def _end(self) -> None:
        self._control.leave()
        self._thread.join(_GRACE_S)
        if self._thread.is_alive():
            raise EngineClosed(f"the engine's thread is still busy {_GRACE_S:g} s after it was told to end")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_control"):
            self._control.leave()


class EngineThread(LoopThread):
    """Owns an `Engine`, whose arguments it takes. See `LoopThread`."""

    instead = "await async_batch_infer, async_stream_infer or Engine.generate here"

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        progress: Callable[[StartPhase], None] | None = None,
    ) -> None:
        self.engine = Engine(model, config, executor=executor, tokenizer=tokenizer)
        super().__init__(self.engine, progress, _outlets_of(self.engine))


def _outlets_of(engine: Engine) -> MakeOutlet:
    """Requests whose reader's context is over are aborted. Knows nothing of the thread, as above."""

    def abort(batch: list[Outgoing]) -> None:
        for out in batch:
            engine.abort(out.request_id)

    return lambda post: Outlet(engine.steps.register_outlet, post, abort)


class _Control:
    """What the thread and its owner share: when it is ready, how to end it, who waits for it."""

    def __init__(self) -> None:
        self.ready: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._lock = threading.RLock()  # `leave` may come from the collector, in the middle of anything
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life: asyncio.Task[None] | None = None
        self._left = False
        self._sealed = False
        self._pid = os.getpid()
        self._waiting: set[Future[Any]] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The thread's loop; there once `ready` is done."""
        if self._loop is None:
            raise EngineClosed("the engine's thread has not started")
        return self._loop

    @property
    def foreign(self) -> bool:
        """Whether this is a forked copy, in whose process the thread does not exist."""
        return os.getpid() != self._pid

    def live(self, loop: asyncio.AbstractEventLoop, life: asyncio.Task[None]) -> None:
        """Engine thread: from now on `leave` has something to cancel."""
        with self._lock:
            self._loop, self._life = loop, life
            if self._left:
                life.cancel()

    def leave(self) -> None:
        """End the thread's life, at whatever point it is; once."""
        with self._lock:
            if self._left or self.foreign:
                return
            self._left = True
            loop, life = self._loop, self._life
        if loop is not None and life is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has ended
                loop.call_soon_threadsafe(life.cancel)

    def start(self, coro: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the loop; its future gets EngineClosed if the loop ends first.

        Raises:
            EngineClosed: the loop takes nothing more.
        """
        with self._lock:
            if self._loop is None or self._sealed or self.foreign:
                coro.close()
                where = ": it runs in another process, from which this one was forked" if self.foreign else ""
                raise EngineClosed(f"the engine's thread has ended{where}")
            future = asyncio.run_coroutine_threadsafe(coro, self._loop)
            self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def seal(self) -> None:
        """Engine thread, while the loop still turns: take nothing more.

        What was taken before becomes a task before the loop stops, and is cancelled with all others. A task that
        began during the loop's last turns would never be run, nor ended.
        """
        with self._lock:
            self._sealed = True

    def end(self) -> None:
        """Engine thread, last of all: the loop is closed."""
        self.seal()
        self.ended.set_result(None)
        for future in list(self._waiting):
            self._fail(future)

    def _fail(self, future: Future[Any]) -> None:
        with contextlib.suppress(Exception):  # it has just been answered
            future.set_exception(EngineClosed("the engine's thread has ended"))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    fill_standard_streams()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _serve(service: Service, control: _Control, progress: Callable[[StartPhase], None] | None) -> None:
    """The thread: its loop is closed with everything on it (tasks, generators, default executor) at the end."""
    try:
        with contextlib.suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_live(service, control, progress))
    except RuntimeError:
        logger.exception("the engine's loop was stopped; use EngineThread.close")
    finally:
        control.end()


async def _live(service: Service, control: _Control, progress: Callable[[StartPhase], None] | None) -> None:
    """Start, stay until cancelled, close."""
    life = asyncio.current_task()
    if life is not None:
        control.live(asyncio.get_running_loop(), life)
    try:
        await service.start(progress)
        control.ready.set_result(None)
        await asyncio.Event().wait()  # until `leave`
    except BaseException as error:
        if control.ready.done():
            raise
        control.ready.set_exception(error)
    finally:
        await service.aclose()
        control.seal()
