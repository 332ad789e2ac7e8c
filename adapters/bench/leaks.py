"""What a process holds, before and after: threads, children, descriptors, memory."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from corogen.adapters.bench import machine

#: seconds that threads which are about to end get for it
_SETTLE_S = 5.0

#: bytes that memory may grow by a request, over the second half of a run
MAX_SLOPE = 1000.0

#: growth over that half which says nothing, in bytes
_NOISE = 4e6


class Holdings(NamedTuple):
    """What this process holds at one moment."""

    threads: list[str]
    children: dict[int, str]
    #: None where the system does not tell
    files: int | None
    rss: int | None

    @classmethod
    def now(cls, *, settle: Holdings | None = None) -> Holdings:
        """Collect garbage and look. With `settle`, threads that were not there then get a moment to end."""
        gc.collect()
        if settle is not None:
            _join_new(settle.threads)
        names = sorted(thread.name for thread in threading.enumerate())
        return cls(names, machine.children(), machine.open_files(), machine.rss_bytes())

    def figures(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        return {
            "threads": len(self.threads),
            "children": len(self.children),
            "files": self.files,
            "rss_mb": None if self.rss is None else self.rss / 1e6,
        }

    def leaked_since(self, before: Holdings) -> list[str]:
        """What is held now and was not before, one sentence each; memory is left to `slope`."""
        found = []
        threads = Counter(self.threads) - Counter(before.threads)
        if threads:
            found.append(f"threads are left: {', '.join(sorted(threads.elements()))}")
        if len(self.children) > len(before.children):
            found.append(f"children are left: {sorted(set(self.children) - set(before.children))}")
        if self.files is not None and before.files is not None and self.files > before.files:
            found.append(f"{self.files - before.files} descriptors are left")
        return found


def _join_new(known: Sequence[str]) -> None:
    end = time.monotonic() + _SETTLE_S
    left = Counter(known)
    for thread in threading.enumerate():
        if left[thread.name]:
            left[thread.name] -= 1
        elif thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Least-squares slope of the second half of `points` (x, y); None for fewer than two of them."""
    half = points[len(points) // 2 :]
    if len(half) < 2:
        return None
    x_mean = sum(x for x, _ in half) / len(half)
    y_mean = sum(y for _, y in half) / len(half)
    spread = sum((x - x_mean) ** 2 for x, _ in half)
    return sum((x - x_mean) * (y - y_mean) for x, y in half) / spread if spread else None


class MemoryLine:
    """Resident memory of processes over the course of a run, by the number of requests that have ended.

    Args:
        pids: process to watch, by name; None: this one.
    """

    def __init__(self, pids: Mapping[str, int | None]) -> None:
        self._pids = pids
        self._points: dict[str, list[tuple[float, float]]] = {who: [] for who in pids}

    def note(self, done: float) -> None:
        """Look now, with `done` requests behind us."""
        for who, pid in self._pids.items():
            rss = machine.rss_bytes(pid)
            if rss is not None:
                self._points[who].append((done, rss))

    def figures(self) -> dict[str, dict[str, Any]]:
        """By process: bytes a request over the second half, and megabytes at a quarter, at half and at the end."""
        return {
            who: {
                "bytes_per_request": slope(points),
                "rss_mb": [points[place][1] / 1e6 for place in (len(points) // 4, len(points) // 2, -1)],
            }
            for who, points in self._points.items()
            if points
        }

    def problems(self) -> list[str]:
        """Processes that grow, beyond what the allocator's own habits explain."""
        found = []
        for who, points in self._points.items():
            by = slope(points)
            if by is not None and by > MAX_SLOPE and by * (points[-1][0] - points[0][0]) / 2 > _NOISE:
                found.append(f"memory of {who} grows by {by:.0f} bytes a request")
        return found
