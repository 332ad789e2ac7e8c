"""What other threads want done on the engine's loop, before the next plan."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from corogen.errors import EngineClosed


class Inbox:
    """Calls posted from any thread; many posts between two looks cost the loop one wake-up.

    Args:
        wake: runs on `loop` when there is something to `drain`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake
        self._thread_id = threading.get_ident()
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        # the collector may drop a stream, and so post its abort, in the middle of `ring`
        self._lock = threading.RLock()
        self._woken = False

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._calls)

    def put(self, function: Callable[[Any], None], argument: Any) -> None:
        """Queue a call without waking the loop: `ring` follows."""
        self._calls.append((function, argument))

    def ring(self) -> None:
        """Let the loop look. Raises EngineClosed if the loop is closed."""
        with self._lock:
            if self._woken:
                return
            self._woken = True
        if threading.get_ident() == self._thread_id:
            self._wake()
            return
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            raise EngineClosed("the engine's event loop is closed") from None

    def drain(self) -> None:
        """On the loop: make every call that was put."""
        with self._lock:
            self._woken = False
        while self._calls:
            function, argument = self._calls.popleft()
            function(argument)
