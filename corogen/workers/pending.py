"""What goes into computing steps, and what comes out, on every device."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """The ids of a launched step, on their way to the host."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._event: Any = None
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
        ids: list[int] = self._ids.tolist()
        return ids
