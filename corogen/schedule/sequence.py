"""One sequence as the scheduler sees it."""

from __future__ import annotations

import enum
from typing import Any

from corogen.wire.messages import Sampling

#: a step of priority is worth so many seconds of waiting: who waits long enough passes even the most urgent newcomer
PRIORITY_S = 10.0


class Status(enum.Enum):
    """Where a sequence stands. Preempted sequences are WAITING again; ENDED is terminal."""

    NEW = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Sequence:
    """Tokens of one request, and how far they are computed.

    ::

        tokens         known ids, prompt first                      [0, len(tokens))
        pending        sampled ids that are still in flight         [len(tokens), len(tokens) + pending)
        num_computed   positions whose keys and values some dispatched step writes
        num_done       positions that a step whose result is in has written

    `owner` is whatever the caller wants back with the sequence's tokens.
    """

    __slots__ = (
        "blocks",
        "decoding",
        "keys",
        "last_step",
        "limit",
        "num_cached",
        "num_computed",
        "num_done",
        "owner",
        "pending",
        "prompt_len",
        "rank",
        "registered",
        "rows_in_flight",
        "sampling",
        "slot",
        "status",
        "tokens",
    )

    def __init__(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        *,
        priority: int = 0,
        arrival: float = 0.0,
        owner: Any = None,
    ) -> None:
        self.tokens = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.limit = len(prompt_ids) + max_new_tokens
        self.sampling = sampling
        #: lower runs first and is preempted last
        self.rank = arrival + priority * PRIORITY_S
        self.owner = owner
        self.status = Status.NEW
        self.slot = -1
        self.blocks: list[int] = []
        #: a step that samples was dispatched since the slot was taken: the worker has the last token
        self.decoding = False
        self.num_computed = 0
        self.num_done = 0
        self.num_cached = 0
        self.pending = 0
        self.rows_in_flight = 0
        self.last_step = -1
        #: hashes of the full blocks of `tokens`, as far as they were needed
        self.keys: list[bytes] = []
        self.registered = 0

    @property
    def ended(self) -> bool:
        """Whether it has come to its end."""
        return self.status is Status.ENDED

    @property
    def progress(self) -> int:
        """Tokens that are known."""
        return len(self.tokens)

    def forget_progress(self) -> None:
        """Start again from the known tokens."""
        self.slot, self.blocks, self.decoding = -1, [], False
        self.num_computed = self.num_done = self.num_cached = self.registered = 0
