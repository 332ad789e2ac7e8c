"""Handles of tasks, by uid, until somebody has read their result."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from corogen.errors import InvalidRequest

if TYPE_CHECKING:
    from corogen.adapters.task_handle import TaskHandle


class Results:
    """What `wait` and `get` find. A result that nobody reads is dropped after `ttl_s` (None: never)."""

    def __init__(self, ttl_s: float | None) -> None:
        self._ttl_s = ttl_s
        self._lock = threading.RLock()  # the collector may drop a handle in the middle of anything
        self._handles: dict[Hashable, TaskHandle] = {}
        #: results that nobody has read yet, the oldest first -> when they are dropped
        self._unread: dict[TaskHandle, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def claim(self, handle: TaskHandle) -> None:
        """The uid of `handle` is in use. Raises InvalidRequest if it was before, or can not be a uid."""
        with self._lock:
            try:
                known = handle.uid in self._handles
            except TypeError:
                raise InvalidRequest(f"a uid must be hashable, and {handle.uid!r} is not", param="uid") from None
            if known:
                raise InvalidRequest(
                    f"the uid {handle.uid!r} is in use until its task has ended and its result was read", param="uid"
                )
            self._handles[handle.uid] = handle

    def find(self, uid: Hashable) -> TaskHandle:
        """The handle of `uid`. Raises InvalidRequest for one that nobody submitted, or that was read already."""
        with self._lock, contextlib.suppress(KeyError, TypeError):
            return self._handles[uid]
        late = f", or its result waited for longer than result_ttl_s={self._ttl_s:g}" if self._ttl_s else ""
        raise InvalidRequest(
            f"there is no task with the uid {uid!r}: it was never submitted, was cancelled or read already{late}",
            param="uid",
        )

    def forget(self, handle: TaskHandle) -> None:
        """The uid is free."""
        with self._lock:
            if self._handles.get(handle.uid) is handle:
                del self._handles[handle.uid]
                self._unread.pop(handle, None)

    def ended(self, handle: TaskHandle) -> None:
        """On the engine's loop: from now on the result waits for its reader."""
        with self._lock:
            if self._ttl_s is not None and self._handles.get(handle.uid) is handle:
                self._unread[handle] = time.monotonic() + self._ttl_s
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(self._ttl_s, self._drop)

    def _drop(self) -> None:
        """On the engine's loop."""
        self._timer = None
        now = time.monotonic()
        with self._lock:
            while self._unread:
                handle, due = next(iter(self._unread.items()))
                if due > now:
                    self._timer = asyncio.get_running_loop().call_later(due - now, self._drop)
                    break
                self.forget(handle)
