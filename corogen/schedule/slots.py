"""The slot semaphore: at most `max_batch_size` sequences hold a row in the workers."""

from __future__ import annotations


class SlotPool:
    """A counting semaphore whose permits have numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._taken: set[int] = set()

    def __bool__(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    @property
    def taken(self) -> int:
        """Slots in use."""
        return len(self._taken)

    def acquire(self) -> int:
        """A free slot; the caller has looked before."""
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Giving one back twice is a fault of ours and raises RuntimeError."""
        if slot not in self._taken:
            raise RuntimeError(f"slot {slot} was given back twice")
        self._taken.remove(slot)
        self._free.append(slot)
