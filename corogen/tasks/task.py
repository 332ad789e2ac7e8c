"""One submitted task, and the batch that it travels in."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from corogen.outputs import Times
from corogen.tasks.batching import SubmitEntry


class Sink(Protocol):
    """Where a task's life is told, on the engine's loop: perhaps that it entered, and then exactly one end."""

    def entered(self) -> None:
        """There was room for it."""

    def finish(self, result: Any) -> None:
        """Its result."""

    def fail(self, error: BaseException) -> None:
        """There will be none."""


class Task:
    """State of one task. Its uid is in use until it has ended."""

    __slots__ = ("ended", "entry", "inside", "sink")

    #: for the quarantine: a task has no intermediate results
    progress = 0

    def __init__(self, uid: Hashable, data: Any, sink: Sink) -> None:
        self.entry = SubmitEntry(uid, data)
        self.sink = sink
        self.ended = False
        #: counts against `queue_size`; the others wait for room
        self.inside = False

    @property
    def uid(self) -> Hashable:
        """The caller's name for it."""
        return self.entry.uid


class Batch:
    """Tasks that are computed together. `body` is the encoded input, kept until the output is in."""

    __slots__ = ("body", "info", "sent_at", "tasks")

    def __init__(self, tasks: dict[Hashable, Task], info: dict[str, Any], body: bytes) -> None:
        self.tasks, self.info, self.body = tasks, info, body
        self.sent_at = 0.0

    @property
    def open(self) -> list[Task]:
        """Tasks that still want their result."""
        return [task for task in self.tasks.values() if not task.ended]


class TaskStats(NamedTuple):
    """A picture of a task engine at one moment."""

    #: tasks that are in no batch yet
    waiting: int
    #: tasks for which there is no room yet
    outside: int
    #: batches at the workers
    in_flight: int
    #: batches that were computed
    batches: int
    #: tasks in them
    batched_tasks: int
    #: tasks by how they ended: "done", "failed", "cancelled"
    ended: dict[str, int]
    #: times that the workers were started again
    restarts: int
    #: from a task's arrival until its batch was made
    queue_time: Times
    #: of a batch, from its dispatch, or from the output before it if that came later, to its output
    batch_time: Times
