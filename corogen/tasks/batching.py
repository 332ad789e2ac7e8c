"""How single tasks become batches, and a batch's output single results. The names are EnergonAI's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class SubmitEntry:
    """One submitted task, as it waits."""

    uid: Hashable
    data: Any
    #: seconds of `time.monotonic`
    arrival: float = field(default_factory=time.monotonic, repr=False)
    #: for batch managers: what they have found out about `data`
    prepared: Any = field(default=None, repr=False)


@dataclass(eq=False)
class TaskEntry:
    """One batch: before the model its input, behind the model its output.

    As input, a tuple or list is passed on as positional arguments, a dict as keywords, anything else as one argument.
    """

    uids: tuple[Hashable, ...]
    batch: Any


class BatchManager:
    """One task a batch. Subclasses override both hooks, each as a plain function or a coroutine.

    A hook that raises, or contradicts itself, fails the tasks concerned and no others.
    """

    def make_batch(self, q: deque[SubmitEntry]) -> Any:
        """Take at least one entry off `q`; return the `TaskEntry`, and a dict of what `split_batch` must know.

        The queue is never empty. A coroutine sees new entries arrive in it while it waits.
        """
        entry = q.popleft()
        return TaskEntry((entry.uid,), entry.data), {}

    def split_batch(self, task_entry: TaskEntry, **batch_info: Any) -> Any:
        """(uid, result) for each task; an iterable, or an asynchronous one. `task_entry.batch` is the output."""
        return [(task_entry.uids[0], task_entry.batch)]

    def hold(self, q: deque[SubmitEntry]) -> float:
        """Seconds to wait for more tasks before `make_batch`, which a new task may shorten. 0: none."""
        return 0.0
