"""Calls a batch manager's hooks, and holds them to their word."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncIterator, Hashable
from typing import Any

from corogen.errors import RequestFailed
from corogen.tasks.batching import BatchManager, SubmitEntry, TaskEntry
from corogen.tasks.task import Batch, Task


class HookFailed(Exception):
    """A hook raised or contradicted itself; `tasks` pay for it."""

    def __init__(self, tasks: list[Task], error: RequestFailed) -> None:
        super().__init__(str(error))
        self.tasks, self.error = tasks, error


async def make_batch(
    manager: BatchManager, queue: deque[SubmitEntry], waiting: dict[Hashable, Task]
) -> tuple[dict[Hashable, Task], Any, dict[str, Any]]:
    """One batch off `queue`: its tasks, the model's input, and what `split_batch` must know.

    `waiting` holds the tasks of `queue` by uid; those that are no longer in the queue leave it, whatever happens.

    Raises:
        HookFailed: with the tasks that the hook took.
    """
    try:
        made = manager.make_batch(queue)
        entry, info = await made if inspect.isawaitable(made) else made
        tasks = {uid: waiting[uid] for uid in entry.uids}
        input_, info = entry.batch, dict(info)
    except Exception as error:
        raise HookFailed(_taken(queue, waiting) or _head(queue, waiting), failure("make_batch", error)) from error
    if tasks and len(waiting) - len(queue) == len(tasks) == len(entry.uids):
        for uid in tasks:
            del waiting[uid]
        return tasks, input_, info
    _drop(queue, tasks)
    taken = _taken(queue, waiting) or _head(queue, waiting)
    words = "make_batch must return the uids of exactly those entries that it takes off the queue, and at least one"
    raise HookFailed(taken, RequestFailed(f"{words}; it took {[t.uid for t in taken]} and returned {entry.uids}"))


def _taken(queue: deque[SubmitEntry], waiting: dict[Hashable, Task]) -> list[Task]:
    """Tasks whose entries are gone from the queue."""
    left = {entry.uid for entry in queue}
    return [waiting.pop(uid) for uid in list(waiting) if uid not in left]


def _head(queue: deque[SubmitEntry], waiting: dict[Hashable, Task]) -> list[Task]:
    """The task whose turn it was: a hook that raises before it takes anything would raise for ever."""
    return [waiting.pop(queue.popleft().uid)] if queue else []


def _drop(queue: deque[SubmitEntry], tasks: dict[Hashable, Task]) -> None:
    for _ in range(len(queue)):
        entry = queue.popleft()
        if entry.uid not in tasks:
            queue.append(entry)


def split_batch(manager: BatchManager, batch: Batch, output: Any) -> Any:
    """What the hook makes of a batch's output: an iterable, an asynchronous one, or an awaitable of either."""
    return manager.split_batch(TaskEntry(tuple(batch.tasks), output), **batch.info)


def is_asynchronous(parts: Any) -> bool:
    """Whether `iterate` has to be used."""
    return inspect.isawaitable(parts) or hasattr(parts, "__aiter__")


async def iterate(parts: Any) -> AsyncIterator[tuple[Hashable, Any]]:
    """The parts, one by one."""
    if inspect.isawaitable(parts):
        parts = await parts
    if hasattr(parts, "__aiter__"):
        async for part in parts:
            yield part
    else:
        for part in parts:
            yield part


def hold(manager: BatchManager, queue: deque[SubmitEntry], waiting: dict[Hashable, Task]) -> float:
    """Seconds to wait for more tasks. Raises HookFailed with the one whose turn it was."""
    try:
        return float(manager.hold(queue)) if hasattr(manager, "hold") else 0.0
    except Exception as error:
        raise HookFailed(_head(queue, waiting), failure("hold", error)) from error


def failure(what: str, error: Exception) -> RequestFailed:
    """What the tasks concerned get."""
    failed = RequestFailed(f"{what} raised {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
