"""What a worker keeps on a GPU between steps: block tables, lengths and last tokens of all slots, in one tensor.

The host has a mirror of what it needs for planning and sends differences; a decode row then needs its slot's number
and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from corogen.sample.penalties import TokenCounts, counts_tokens
from corogen.sample.sampler import SampleRow
from corogen.wire.messages import PrefillRow, Sampling, SlotBlocks, SlotInit

#: positions beyond the longest sequence that a table has room for: steps under way when a sequence ends
_SLACK = 64
_NEVER = np.iinfo(np.int64).max


class ResidentSlots:
    """All slots of a worker. Changes are collected and reach the device with the next step."""

    def __init__(self, max_slots: int, max_len: int, block_size: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._width = -(-(max_len + _SLACK) // block_size)
        tables = max_slots * self._width
        #: tables, then lengths, then last tokens
        self.state = torch.zeros(tables + 2 * max_slots, dtype=torch.int32, device=device)
        self.tables = self.state[:tables].view(max_slots, self._width)
        #: [max_slots], tokens whose keys and values are in the cache
        self.lengths = self.state[tables : tables + max_slots]
        #: [max_slots], the token that a decode row of the slot reads
        self.last_tokens = self.state[tables + max_slots :]
        self._first_length = tables
        self._host_lengths = np.zeros(max_slots, np.int64)
        self._num_blocks = np.zeros(max_slots, np.int64)
        self._ready = np.zeros(max_slots, np.bool_)
        #: from which position on the slot's next token is simply the best
        self._plain_from = np.full(max_slots, _NEVER)
        self._sampling: list[Sampling] = [Sampling()] * max_slots
        self._counts: dict[int, TokenCounts] = {}
        self._changed: list[int] = []
        self._values: list[int] = []

    # --- from the engine ---------------------------------------------------------------------------------------------

    def apply(self, init: Sequence[SlotInit], blocks: Sequence[SlotBlocks]) -> None:
        """Take over the engine's differences, resets first."""
        for new in init:
            self._reset(new)
        for more in blocks:
            self._append(more.slot, more.blocks)

    def _reset(self, new: SlotInit) -> None:
        slot = new.slot
        self._ready[slot], self._num_blocks[slot] = True, 0
        self._sampling[slot], self._plain_from[slot] = new.sampling, _plain_from(new.sampling)
        self._counts.pop(slot, None)
        if counts_tokens(new.sampling):
            self._counts[slot] = TokenCounts(new.prompt_len, self._vocab_size, self._device)
            self._counts[slot].add(new.cached_ids, 0)
        self.set_length(slot, new.num_cached)

    def set_length(self, slot: int, length: int) -> None:
        """So many tokens will be in the cache once the next step is computed."""
        self._host_lengths[slot] = length
        self._changed.append(self._first_length + slot)
        self._values.append(length)

    def _append(self, slot: int, blocks: Sequence[int]) -> None:
        first = int(self._num_blocks[slot])
        if first + len(blocks) > self._width:
            raise RuntimeError(f"slot {slot} has more blocks than its table has room for")
        start = slot * self._width + first
        self._changed += range(start, start + len(blocks))
        self._values += blocks
        self._num_blocks[slot] = first + len(blocks)

    def take_changes(self) -> np.ndarray | None:
        """[2, n] places in `state` and their new values, each place once; None when nothing has changed."""
        if not self._changed:
            return None
        latest = dict(zip(self._changed, self._values, strict=True))
        self._changed, self._values = [], []
        return np.array([list(latest), list(latest.values())], np.int32)

    # --- for a step --------------------------------------------------------------------------------------------------

    def require(self, slots: np.ndarray) -> None:
        """Raise RuntimeError for a slot that was never set up."""
        if not self._ready[slots].all():
            missing = slots[~self._ready[slots]][0]
            raise RuntimeError(f"slot {missing} is used by a step before it was set up")

    def longest_first(self, slots: np.ndarray) -> np.ndarray:
        """[n] places in `slots`, those of long sequences first: attention ends sooner when it begins with them."""
        return np.argsort(-self._host_lengths[slots], kind="stable")

    def count_prefill(self, rows: Sequence[PrefillRow]) -> None:
        """Add the chunks' tokens to the slots that count."""
        if self._counts:
            for row in rows:
                if row.slot in self._counts:
                    self._counts[row.slot].add(row.token_ids, row.start)

    def ends(self, decode: np.ndarray, prefill: Sequence[PrefillRow]) -> np.ndarray:
        """The absolute positions of the tokens that the rows will get."""
        return np.concatenate(
            [self._host_lengths[decode] + 1, [r.start + len(r.token_ids) for r in prefill if r.sample]]
        ).astype(np.int64)

    def all_plain(self, slots: np.ndarray, ends: np.ndarray) -> bool:
        """Whether the best token is what every row wants."""
        return bool((ends >= self._plain_from[slots]).all())

    def sample_rows(self, slots: np.ndarray, ends: np.ndarray) -> list[SampleRow]:
        """What the sampler needs to know of each row."""
        pairs = zip(slots.tolist(), ends.tolist(), strict=True)
        return [SampleRow(self._sampling[s], end, self._counts.get(s)) for s, end in pairs]

    def advance(self, decode: np.ndarray) -> None:
        """The decode rows' tokens are in the cache now; the device has counted by itself."""
        self._host_lengths[decode] += 1

    def count_sampled(self, slots: np.ndarray, ids: torch.Tensor) -> None:
        """`ids` [n] are the new tokens of `slots`."""
        if self._counts:
            for i, slot in enumerate(slots.tolist()):
                if slot in self._counts:
                    self._counts[slot].add_sampled(ids[i : i + 1])

    def clear(self) -> None:
        """Forget every slot."""
        self.state.zero_()
        self._ready[:] = False
        self._counts.clear()
        self._changed, self._values = [], []


def _plain_from(sampling: Sampling) -> int:
    if sampling.temperature > 0 or sampling.banned_ids or counts_tokens(sampling):
        return _NEVER
    return sampling.suppress_until if sampling.suppress_ids else 0
