"""Dynamic batching of tensors: what fits together goes together, up to a size, a time and a number of tokens."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from corogen.errors import ConfigError
from corogen.tasks import collate
from corogen.tasks.batching import BatchManager, SubmitEntry, TaskEntry

#: of the queue, as a multiple of the largest batch: how far is looked for tasks that fit to the first
_LOOK_AHEAD = 8


class Prepared(NamedTuple):
    """What a task's data is made of."""

    #: the data with tensors for lists and numbers
    data: Any
    #: tasks can share a batch only if these are equal
    kind: Hashable
    #: tokens: the first dimension of the first tensor
    length: int


class DynamicBatchManager(BatchManager):
    """Batches of tensors. The oldest task always is in the next batch; others join it if they fit to it.

    Data is a tensor, an array, a number, a list of numbers, or a dict, tuple or list of these.

    Args:
        max_batch_size: tasks a batch, at most.
        max_wait_s: how long the oldest task waits for others; 0: what is there is taken at once.
        max_tokens: tokens a batch, padding included, at most; 0: no bound. A longer task goes alone.
        buckets: upper bounds of lengths; only tasks of one bucket share a batch. Empty: lengths do not matter.
        mode: "stack" adds a dimension and wants equal shapes. "pad" fills the first dimension up to the longest.
            "pack" joins along the first dimension; the model gets the lengths besides, as the keyword or last
            argument `lengths`.
        pad_value: what "pad" fills with; a dict has one for each name, 0 for those that it lacks.
        pad_side: "right" or "left".
        mask: with "pad" and data in a dict: the name of a mask, 1 for tokens and 0 for padding, that is added; None:
            none is.
        per_token: the output has a row for each token, not one for each task.
        length: the number of tokens of a task's data; None: the first dimension of its first tensor.
    """

    def __init__(
        self,
        max_batch_size: int = 32,
        *,
        max_wait_s: float = 0.0,
        max_tokens: int = 0,
        buckets: Sequence[int] = (),
        mode: Literal["stack", "pad", "pack"] = "stack",
        pad_value: float | dict[str, float] = 0,
        pad_side: Literal["right", "left"] = "right",
        mask: str | None = "attention_mask",
        per_token: bool = False,
        length: Callable[[Any], int] | None = None,
    ) -> None:
        self.max_batch_size, self.max_wait_s, self.max_tokens = max_batch_size, max_wait_s, max_tokens
        self.buckets = sorted(buckets)
        self.mode, self.pad_value, self.pad_side, self.mask = mode, pad_value, pad_side, mask
        self.per_token, self._length = per_token, length
        self._check()

    def _check(self) -> None:
        problems = []
        if self.max_batch_size < 1:
            problems.append(f"max_batch_size must be at least 1, not {self.max_batch_size!r}")
        if self.max_wait_s < 0 or self.max_tokens < 0:
            problems.append(f"max_wait_s and max_tokens must not be below 0: {self.max_wait_s!r}, {self.max_tokens!r}")
        if self.mode not in ("stack", "pad", "pack"):
            problems.append(f'mode must be "stack", "pad" or "pack", not {self.mode!r}')
        if self.pad_side not in ("right", "left"):
            problems.append(f'pad_side must be "right" or "left", not {self.pad_side!r}')
        if self.per_token and self.mode == "stack":
            problems.append('per_token needs mode="pad" or "pack": stacked tasks all have the same length')
        if problems:
            raise ConfigError(problems)

    # ------------------------------------------------------------------ the hooks

    def hold(self, q: deque[SubmitEntry]) -> float:
        """Until the oldest task has waited long enough, or a batch is full."""
        if self.max_wait_s <= 0 or len(q) >= self.max_batch_size or self._budget_is_full(q):
            return 0.0
        return q[0].arrival + self.max_wait_s - time.monotonic()

    def make_batch(self, q: deque[SubmitEntry]) -> tuple[TaskEntry, dict[str, Any]]:
        """The oldest task, and those that fit to it."""
        chosen = self._choose(q)
        if len(chosen) < len(q):
            taken = set(map(id, chosen))
            ahead = [q.popleft() for _ in range(min(len(q), self._window))]
            q.extendleft(entry for entry in reversed(ahead) if id(entry) not in taken)
        else:
            q.clear()
        prepared = [self._prepared(entry) for entry in chosen]
        lengths = [p.length for p in prepared]
        batch = self._collate([p.data for p in prepared], lengths)
        return TaskEntry(tuple(entry.uid for entry in chosen), batch), {"lengths": lengths}

    def split_batch(self, task_entry: TaskEntry, **batch_info: Any) -> Iterable[tuple[Hashable, Any]]:
        """Each task's row of the output, or its rows."""
        return zip(task_entry.uids, self._rows(task_entry.batch, batch_info["lengths"]), strict=True)

    # ------------------------------------------------------------------

    @property
    def _window(self) -> int:
        return _LOOK_AHEAD * self.max_batch_size

    def _choose(self, q: deque[SubmitEntry]) -> list[SubmitEntry]:
        first = self._prepared(q[0])  # raises for data that is wrong, which fails this task alone
        chosen, longest, total = [q[0]], first.length, first.length
        for entry in itertools.islice(q, 1, self._window):
            if len(chosen) == self.max_batch_size:
                break
            if not self._fits(entry, first):
                continue
            length = self._prepared(entry).length
            tokens = max(longest, length) * (len(chosen) + 1) if self.mode == "pad" else total + length
            if self.max_tokens and tokens > self.max_tokens:
                continue
            chosen.append(entry)
            longest, total = max(longest, length), total + length
        return chosen

    def _fits(self, entry: SubmitEntry, first: Prepared) -> bool:
        try:
            other = self._prepared(entry)
        except Exception:
            return False  # it will be told when it is the first
        return other.kind == first.kind and self._bucket(other.length) == self._bucket(first.length)

    def _bucket(self, length: int) -> int:
        return bisect_left(self.buckets, length)

    def _prepared(self, entry: SubmitEntry) -> Prepared:
        if not isinstance(entry.prepared, Prepared):
            data = collate.as_tensors(entry.data)
            kind = collate.kind(data, skip_first=self.mode != "stack")
            length = collate.first_length(data) if self._length is None else self._length(entry.data)
            entry.prepared = Prepared(data, kind, length)
        return entry.prepared

    def _budget_is_full(self, q: deque[SubmitEntry]) -> bool:
        if not self.max_tokens:
            return False
        total = 0
        for entry in q:
            try:
                total += self._prepared(entry).length
            except Exception:
                return True  # it is told at once
        return total >= self.max_tokens

    def _collate(self, rows: list[Any], lengths: list[int]) -> Any:
        if self.mode == "stack":
            return collate.stack(rows)
        if self.mode == "pack":
            return collate.pack(rows, lengths)
        return collate.pad(rows, lengths, self.pad_value, self.pad_side, self.mask)

    def _rows(self, output: Any, lengths: list[int]) -> list[Any]:
        if not self.per_token:
            return collate.rows(output, len(lengths))
        if self.mode == "pack":
            return collate.unpack(output, lengths)
        return collate.unpad(output, lengths, self.pad_side)
