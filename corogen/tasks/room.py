"""How many tasks may be outstanding, and who waits for room; from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from corogen.errors import CorogenError, EngineClosed, QueueFullError
from corogen.inbox import Inbox
from corogen.tasks.task import Task


class Room:
    """Tasks that have not ended. At most `queue_size` are inside (0: no bound); others are refused, or wait outside."""

    def __init__(self, queue_size: int) -> None:
        self._queue_size = queue_size
        self._inbox: Inbox
        self._enter: Callable[[Task], None]
        self._lock = threading.RLock()  # a handle that the collector drops may come in the middle of anything
        self._refusal: CorogenError | None = EngineClosed("the engine is not started")
        self._tasks: dict[Task, None] = {}
        self._outside: deque[Task] = deque()
        self._inside = 0

    def connect(self, inbox: Inbox, enter: Callable[[Task], None]) -> None:
        """On the engine's loop: `enter` gets each task that comes in, in order, out of `inbox`."""
        self._inbox, self._enter = inbox, enter

    def open(self) -> None:
        """Take tasks from now on."""
        with self._lock:
            self._refusal = None

    def refuse(self, error: CorogenError) -> None:
        """Take none any more; the first reason counts."""
        with self._lock:
            self._refusal = self._refusal or error

    @property
    def refusing(self) -> bool:
        """Whether no tasks are taken."""
        return self._refusal is not None

    def check_open(self) -> None:
        """Raise EngineClosed unless tasks are taken."""
        refusal = self._refusal
        if isinstance(refusal, EngineClosed):  # a fresh one: an object must not collect the tracebacks of many threads
            raise EngineClosed(str(refusal))
        if refusal is not None:
            raise EngineClosed(f"the engine has stopped: {refusal}") from refusal

    def add(self, task: Task, *, wait: bool) -> None:
        """Take one task. Never blocks; without room it waits outside if it may.

        Raises:
            QueueFullError: there is no room.
            EngineClosed: no tasks are taken.
        """
        with self._lock:
            self.check_open()
            has_room = not self._queue_size or (self._inside < self._queue_size and not self._outside)
            if not has_room and not wait:
                raise self._full()
            self._tasks[task] = None
            if has_room:
                self._let_in(task)
            else:
                self._outside.append(task)
        self._inbox.ring()

    def _full(self) -> QueueFullError:
        text = (
            f"{self._inside} tasks are outstanding and queue_size is {self._queue_size}: wait for some to finish, "
            "await submit_async, which waits for room, or raise the limit"
        )
        return QueueFullError(self._inside, self._queue_size, message=text)

    def _let_in(self, task: Task) -> None:
        task.inside = True
        self._inside += 1
        self._inbox.put(self._enter, task)  # under the lock: whoever closes the engine finds it there

    def leave(self, task: Task) -> bool:
        """On the engine's loop: a task has ended, inside or outside. Returns whether it was the last one."""
        with self._lock:
            del self._tasks[task]
            if task.inside:
                self._inside -= 1
            while self._outside and (self._outside[0].ended or self._inside < self._queue_size):
                first = self._outside.popleft()
                if not first.ended:
                    self._let_in(first)
            last = not self._tasks
        self._inbox.drain()
        return last

    def tasks(self) -> list[Task]:
        """Those that have not ended."""
        with self._lock:
            return list(self._tasks)

    @property
    def num_outside(self) -> int:
        """Tasks that wait for room, those included that were cancelled meanwhile."""
        return len(self._outside)
