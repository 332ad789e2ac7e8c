"""Requests that may wait or run only so long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from corogen.errors import RequestTimeout

if TYPE_CHECKING:
    from corogen.request import ActiveRequest


class Deadlines:
    """One timer for each deadline of a request; a request without one costs nothing. On the engine's loop.

    Args:
        expire: ends a request with its RequestTimeout.
    """

    def __init__(self, expire: Callable[[ActiveRequest, RequestTimeout], None]) -> None:
        self._expire = expire
        self._queueing: dict[str, asyncio.TimerHandle] = {}
        self._total: dict[str, asyncio.TimerHandle] = {}

    def watch(self, active: ActiveRequest) -> None:
        """From now on; the time counts from the request's arrival."""
        request = active.request
        if request.queue_timeout_s is not None:
            what = f"queue_timeout_s={request.queue_timeout_s:g} passed before its turn came"
            self._queueing[request.id] = self._timer(active, request.queue_timeout_s, what)
        if request.timeout_s is not None:
            what = f"timeout_s={request.timeout_s:g} passed before its answer was complete"
            self._total[request.id] = self._timer(active, request.timeout_s, what)

    def started(self, request_id: str) -> None:
        """The request waits no more."""
        self._cancel(self._queueing, request_id)

    def ended(self, request_id: str) -> None:
        """The request has ended."""
        self._cancel(self._queueing, request_id)
        self._cancel(self._total, request_id)

    def _timer(self, active: ActiveRequest, seconds: float, what: str) -> asyncio.TimerHandle:
        error = RequestTimeout(f"request {active.request.id}: {what}")
        left = active.request.arrival + seconds - time.monotonic()
        return asyncio.get_running_loop().call_later(max(left, 0.0), self._expire, active, error)

    def _cancel(self, timers: dict[str, asyncio.TimerHandle], request_id: str) -> None:
        timer = timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
