"""A few threads for long pieces of text work: tokenising, rendering a chat, reading a model's files."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from corogen.errors import EngineClosed

_THREADS = 2

Result = TypeVar("Result")


class TextPool:
    """The threads start with the first piece of work."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="corogen-text")
        self._closed = False

    async def run(self, function: Callable[..., Result], *args: object) -> Result:
        """`function(*args)`, for a coroutine of any loop. Raises EngineClosed if it could not begin before the end."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *args))
        except RuntimeError:
            if self._closed:
                raise EngineClosed("the engine is closed") from None
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):  # `close` has dropped it
                raise EngineClosed("the engine is closed") from None
            raise

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Run `function` for anybody; it delivers its result itself. Raises EngineClosed."""
        try:
            return self._pool.submit(function)
        except RuntimeError:
            if self._closed:
                raise EngineClosed("the engine is closed") from None
        done: Future[None] = Future()  # the interpreter is exiting and gives out no threads: run it here
        function()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Drop what has not begun; what has is not waited for."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
