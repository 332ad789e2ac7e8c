"""The dedicated engine thread: one event loop, one engine, commanded from any other thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, TypeVar

from corogen.config import EngineConfig
from corogen.engine import Engine
from corogen.errors import BlockingCallError, EngineClosed
from corogen.text.tokenizer import Tokenizer
from corogen.wire.messages import StartPhase
from corogen.workers.executor import Executor

Result = TypeVar("Result")

#: seconds beyond its own bound that a close waits for the thread
_JOIN_S = 30.0


class EngineThread:
    """Owns an engine on a loop of its own (uvloop where it is installed), in a daemon thread.

    Arguments are those of `Engine`. The constructor returns when the engine is ready and raises what its start raises;
    nothing is left behind then. Dropping the last reference closes the engine, too.
    """

    def __init__(
        self,
        model: str | None = None,
        config: EngineConfig | None = None,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        progress: Callable[[StartPhase], None] | None = None,
    ) -> None:
        self.engine = Engine(model, config, executor=executor, tokenizer=tokenizer)
        self._control = _Control()
        # the target knows nothing of this object, so that dropping it is noticed
        self._thread = threading.Thread(
            target=_serve, args=(self.engine, self._control, progress), name="corogen-engine", daemon=True
        )
        self._thread.start()
        try:
            self._control.ready.result()
        except BaseException:
            self._control.leave()
            self._thread.join(_JOIN_S)
            raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The engine's loop, for `asyncio.run_coroutine_threadsafe`."""
        return self.engine.loop

    def run(self, coro: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the engine's loop and return its result; from any other thread.

        Raises:
            BlockingCallError: called in the engine's own thread, where it would wait for itself.
            EngineClosed: the loop has ended.
        """
        if self.engine.owns_this_thread:
            coro.close()
            raise BlockingCallError("EngineThread.run would wait for the loop that it runs on: await the coroutine")
        future = self._start(coro)
        try:
            return future.result()
        except CancelledError:
            raise EngineClosed("the engine's thread ended before the coroutine did") from None
        except BaseException:
            future.cancel()
            raise

    def _start(self, coro: Coroutine[Any, Any, Result]) -> Future[Result]:
        try:
            return asyncio.run_coroutine_threadsafe(coro, self.loop)
        except RuntimeError:
            coro.close()
            raise EngineClosed("the engine's thread has ended") from None

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Close the engine and end the thread. Idempotent, from any thread but the engine's own.

        Requests that still run get EngineClosed; with `drain` they may finish first, for `timeout_s` at most.
        """
        if self.engine.owns_this_thread and self._thread.is_alive():
            raise BlockingCallError("close() would wait for the thread that it runs in: await Engine.aclose()")
        with contextlib.suppress(EngineClosed):
            self.run(self.engine.aclose(drain=drain, timeout_s=timeout_s))
        self._control.leave()
        self._thread.join(_JOIN_S)

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        control = getattr(self, "_control", None)
        if control is not None:
            control.leave()


class _Control:
    """What the thread and its owner share: when it is ready, and how to end it."""

    def __init__(self) -> None:
        self.ready: Future[None] = Future()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.life: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """End the thread's life, at whatever point it is."""
        if self.loop is not None and self.life is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has ended
                self.loop.call_soon_threadsafe(self.life.cancel)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _serve(engine: Engine, control: _Control, progress: Callable[[StartPhase], None] | None) -> None:
    with contextlib.suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_live(engine, control, progress))


async def _live(engine: Engine, control: _Control, progress: Callable[[StartPhase], None] | None) -> None:
    """Start, stay until cancelled, close."""
    control.loop, control.life = asyncio.get_running_loop(), asyncio.current_task()
    try:
        await engine.start(progress)
    except BaseException as error:
        control.ready.set_exception(error)
        return
    control.ready.set_result(None)
    try:
        await asyncio.Event().wait()  # until `leave`
    finally:
        await engine.aclose()
