"""What a worker keeps between steps: one row per slot, and the last token of each slot on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from corogen.attention.plan import RowSpan
from corogen.sample.penalties import TokenCounts, counts_tokens
from corogen.sample.sampler import SampleRow
from corogen.wire.messages import PrefillRow, Sampling, SlotBlocks, SlotInit, StepInput


class Slot:
    """One sequence's row."""

    def __init__(self, init: SlotInit, counts: TokenCounts | None) -> None:
        self.sampling: Sampling = init.sampling
        #: tokens whose keys and values are in the cache
        self.length = init.num_cached
        self.counts = counts
        self._blocks = np.zeros(8, np.int32)
        self._num_blocks = 0

    def append_blocks(self, blocks: Sequence[int]) -> None:
        """Extend the block table."""
        end = self._num_blocks + len(blocks)
        if end > len(self._blocks):
            grown = np.zeros(max(end, 2 * len(self._blocks)), np.int32)
            grown[: self._num_blocks] = self._blocks[: self._num_blocks]
            self._blocks = grown
        self._blocks[self._num_blocks : end] = blocks
        self._num_blocks = end

    @property
    def blocks(self) -> np.ndarray:
        """The block table, in order."""
        return self._blocks[: self._num_blocks]


class SlotTable:
    """All slots of a worker."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots: list[Slot | None] = [None] * max_slots
        self._vocab_size, self._device = vocab_size, device
        #: [max_slots], the token that a decode row of the slot reads
        self.last_tokens = torch.zeros(max_slots, dtype=torch.long, device=device)

    def apply(self, init: Sequence[SlotInit], blocks: Sequence[SlotBlocks]) -> None:
        """Take over the engine's differences, resets first."""
        for new in init:
            self._slots[new.slot] = Slot(new, self._counts(new))
        for more in blocks:
            self[more.slot].append_blocks(more.blocks)

    def _counts(self, init: SlotInit) -> TokenCounts | None:
        if not counts_tokens(init.sampling):
            return None
        counts = TokenCounts(init.prompt_len, self._vocab_size, self._device)
        counts.add(init.cached_ids, 0)
        return counts

    def __getitem__(self, slot: int) -> Slot:
        found = self._slots[slot]
        if found is None:
            raise RuntimeError(f"slot {slot} is used by a step before it was set up")
        return found

    def decode_spans(self, slots: Sequence[int]) -> list[RowSpan]:
        """One token each, behind what is cached."""
        return [RowSpan(self[s].length, 1, self[s].blocks) for s in slots]

    def prefill_spans(self, rows: Sequence[PrefillRow]) -> list[RowSpan]:
        """The chunks' tokens."""
        return [RowSpan(r.start, len(r.token_ids), self[r.slot].blocks) for r in rows]

    def count_prefill(self, rows: Sequence[PrefillRow]) -> None:
        """Add the chunks' tokens to the slots that count."""
        for row in rows:
            counts = self[row.slot].counts
            if counts is not None:
                counts.add(row.token_ids, row.start)

    def sample_rows(self, step: StepInput) -> tuple[list[int], list[SampleRow]]:
        """Slots and settings of the rows that get a token, in the result's order."""
        slots = [*step.decode, *(r.slot for r in step.prefill if r.sample)]
        ends = [self[s].length + 1 for s in step.decode]
        ends += [r.start + len(r.token_ids) for r in step.prefill if r.sample]
        rows = [SampleRow(self[s].sampling, end, self[s].counts) for s, end in zip(slots, ends, strict=True)]
        return slots, rows

    def advance(self, step: StepInput, slots: Sequence[int], index: torch.Tensor, ids: torch.Tensor) -> None:
        """The step was launched: `ids` [n] are the new last tokens of `slots`; `index` [n] is `slots` on the device."""
        for s in step.decode:
            self[s].length += 1
        for r in step.prefill:
            self[r.slot].length = r.start + len(r.token_ids)
        self.last_tokens.index_copy_(0, index, ids)
        for i, s in enumerate(slots):
            counts = self[s].counts
            if counts is not None:
                counts.add_sampled(ids[i : i + 1])
