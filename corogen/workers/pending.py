"""What goes into computing steps, and what comes out, on every device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch


class Limits(NamedTuple):
    """Bounds of one worker's steps."""

    max_slots: int
    #: tokens of prompt and answer together
    max_len: int
    max_step_tokens: int
    #: the last position that the model can address
    last_position: int
    vocab_size: int


class PendingTokens:
    """The ids of a launched step, on their way to the host.

    Args:
        order: [n] places that the first n ids belong to; None: they are in their places.
    """

    def __init__(self, ids: torch.Tensor, order: np.ndarray | None = None) -> None:
        self._event: Any = None
        self._order = order
        self._ids = ids
        if ids.is_cuda:
            self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._ids.copy_(ids, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[int]:
        """Block until the ids are on the host; in the order that `StepInput` defines. Safe from another thread."""
        if self._event is not None:
            self._event.synchronize()
        if self._order is not None and len(self._order):
            moved = self._ids.numpy().copy()
            moved[self._order] = moved[: len(self._order)].copy()
        else:
            moved = self._ids.numpy()
        ids: list[int] = moved.tolist()
        return ids
