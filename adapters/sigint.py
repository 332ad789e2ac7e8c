"""Ctrl-C that shuts an engine down; for programs that ask for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from corogen.errors import InvalidRequest


class SigintHandler:
    """The first Ctrl-C calls `shutdown` and raises KeyboardInterrupt; a second goes where it went before, at once."""

    def __init__(self, shutdown: Callable[[], None]) -> None:
        self._shutdown = shutdown
        self._before: Any = None
        self._installed = False

    def install(self) -> None:
        """From now on. Raises InvalidRequest outside the main thread, where Python allows no signal handlers."""
        if threading.current_thread() is not threading.main_thread():
            raise InvalidRequest("register_sigint works in the main thread only: signal handlers belong to it")
        if not self._installed:
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._installed = True

    def restore(self) -> None:
        """What was there before is there again, unless somebody has replaced ours."""
        if self._installed:
            with contextlib.suppress(ValueError):  # not the main thread: the handler stays, and passes on
                if signal.getsignal(signal.SIGINT) == self._handle:
                    signal.signal(signal.SIGINT, self._before)
                self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.restore()
        self._shutdown()
        raise KeyboardInterrupt
