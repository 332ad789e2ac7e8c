"""The way in, from any thread: who may enter, who waits outside, and when nobody may any more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from corogen.errors import CorogenError, EngineClosed, InvalidRequest, QueueFullError
from corogen.inbox import Inbox

if TYPE_CHECKING:
    from corogen.request import ActiveRequest
    from corogen.step_loop import StepLoop


class Intake:
    """Bounds what is outstanding, and carries requests and aborts to the engine's loop.

    A request is *inside* from its acceptance to its end; its prompt counts as waiting until it first runs. What comes
    when there is no room is refused, or waits *outside* in the order of arrival if its caller wants that.

    Args:
        queue_size: requests inside at most; 0: no bound.
        max_waiting_tokens: prompt tokens inside that wait, at most; 0: no bound. A prompt that alone is longer enters
            when nothing else waits.
    """

    def __init__(self, queue_size: int = 0, max_waiting_tokens: int = 0) -> None:
        self._queue_size, self._max_tokens = queue_size, max_waiting_tokens
        # a stream that the collector drops may abort in the middle of a submit
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._refusal: CorogenError | None = EngineClosed("the engine is not started: use `async with` or `start()`")
        self._steps: StepLoop | None = None
        self._inbox: Inbox | None = None
        self._ids: set[str] = set()
        self._inside = self._waiting_tokens = self._outside = 0

    # ------------------------------------------------------------------ opening and closing, on the engine's loop

    def connect(self, steps: StepLoop, inbox: Inbox) -> None:
        """Where requests go."""
        self._steps, self._inbox = steps, inbox

    def open(self) -> None:
        """Take requests from now on."""
        with self._lock:
            self._refusal = None

    def refuse(self, error: CorogenError) -> None:
        """Take no more requests; the first reason counts."""
        with self._lock:
            self._refusal = self._refusal or error
            self._room.notify_all()

    @property
    def refusing(self) -> bool:
        """Whether no requests are taken."""
        return self._refusal is not None

    def refused(self) -> CorogenError:
        """A fresh exception of the stored kind: one object must not collect the tracebacks of many threads."""
        stored = self._refusal
        if isinstance(stored, EngineClosed) or stored is None:
            return EngineClosed(str(stored))
        closed = EngineClosed(f"the engine has stopped: {stored}")
        closed.__cause__ = stored
        return closed

    # ------------------------------------------------------------------ from any thread

    def check_open(self) -> None:
        """Raise EngineClosed unless requests are taken."""
        if self._refusal is not None:
            raise self.refused()

    def submit(self, active: ActiveRequest, *, wait: bool) -> None:
        """Queue a request; without room it waits outside if it may. Never blocks.

        Raises:
            QueueFullError: no room, with the current sizes.
            InvalidRequest: the request's id is in use.
            EngineClosed: no requests are taken.
        """
        request_id = active.request.id
        with self._lock:
            self.check_open()
            if request_id in self._ids:
                raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
            if not self._outside and self._has_room(active):
                self._enter(active)
            elif wait:
                self._outside += 1
            else:
                raise QueueFullError(self._inside, self._queue_size, self._waiting_tokens, self._max_tokens)
            self._ids.add(request_id)
            inbox, steps = self._connected()
            inbox.put(steps.add, active)  # under the lock: who closes the engine finds it there
        inbox.ring()

    def abort(self, request_id: str) -> None:
        """End a request as aborted. At any time, more than once, and for unknown ids."""
        if request_id in self._ids:
            inbox, steps = self._connected()
            inbox.put(steps.abort, request_id)
            with contextlib.suppress(EngineClosed):
                inbox.ring()

    def wait_for_room(self, unless: Callable[[], bool]) -> None:
        """Block the calling thread until one more short request would have room, none is taken, or `unless()`."""
        with self._room:
            self._room.wait_for(lambda: self.refusing or unless() or (not self._outside and not self._full()))

    def wake_waiters(self) -> None:
        """Those who wait for room look again."""
        with self._room:
            self._room.notify_all()

    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        with self._lock:
            return list(self._ids)

    @property
    def num_posted(self) -> int:
        """Calls that the engine's loop has not seen yet."""
        return len(self._inbox) if self._inbox is not None else 0

    # ------------------------------------------------------------------ on the engine's loop

    def let_in(self, active: ActiveRequest) -> bool:
        """Whether a request that waited outside enters now."""
        with self._lock:
            if not self._has_room(active):
                return False
            self._outside -= 1
            self._enter(active)
            return True

    def started(self, active: ActiveRequest) -> None:
        """Its prompt waits no more."""
        with self._lock:
            self._waiting_tokens -= active.waiting_tokens
            active.waiting_tokens = 0
            self._room.notify_all()

    def left(self, active: ActiveRequest) -> bool:
        """A request has ended, inside or outside. Returns whether it was the last one."""
        with self._lock:
            self._ids.discard(active.request.id)
            if active.inside:
                self._inside -= 1
                self.started(active)
            else:
                self._outside -= 1
            return not self._ids

    def drain(self) -> None:
        """Make every call that was posted."""
        if self._inbox is not None:
            self._inbox.drain()

    # ------------------------------------------------------------------

    def _connected(self) -> tuple[Inbox, StepLoop]:
        if self._inbox is None or self._steps is None:
            raise self.refused()
        return self._inbox, self._steps

    def _full(self) -> bool:
        return bool(self._queue_size and self._inside >= self._queue_size) or bool(
            self._max_tokens and self._waiting_tokens >= self._max_tokens
        )

    def _has_room(self, active: ActiveRequest) -> bool:
        tokens = self._waiting_tokens + active.seq.prompt_len
        alone = self._waiting_tokens == 0
        return not self._full() and (alone or not self._max_tokens or tokens <= self._max_tokens)

    def _enter(self, active: ActiveRequest) -> None:
        active.inside = True
        active.waiting_tokens = active.seq.prompt_len
        self._inside += 1
        self._waiting_tokens += active.waiting_tokens
