"""What attention needs to know about one step, worked out once a step and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from corogen.attention.base import causal_mask


class RowSpan(NamedTuple):
    """`num_tokens` tokens of one sequence, the first at position `start`; `blocks` is its block table."""

    start: int
    num_tokens: int
    blocks: np.ndarray


class DecodeGroup(NamedTuple):
    """Decode rows of about the same length, which are computed together."""

    #: places in the step's token order: a slice when they are neighbours, else an index tensor
    rows: slice | torch.Tensor
    size: int
    #: [size * blocks a row], flat
    blocks: torch.Tensor
    #: [size, 1, 1, keys], added to the scores
    mask: torch.Tensor


class PrefillSpan(NamedTuple):
    """Neighbouring tokens of one sequence."""

    tokens: slice
    #: blocks to gather, or None when this step's own keys and values are all there is to see
    blocks: torch.Tensor | None
    num_keys: int
    #: [tokens, keys], added to the scores; None: plainly causal
    mask: torch.Tensor | None


class WindowPlan(NamedTuple):
    """The step as seen by the layers of one sliding window (None: all of the context)."""

    decode: list[DecodeGroup]
    prefill: list[PrefillSpan]


class StepPlan(NamedTuple):
    """One step: decode rows first, then the prefill rows' tokens."""

    #: [T], where each token's key and value go: block * block_size + offset
    write: torch.Tensor
    num_tokens: int
    windows: dict[int | None, WindowPlan]


class Planner:
    """Makes plans for one model on one device."""

    def __init__(
        self, block_size: int, windows: Sequence[int | None], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size, self._windows = block_size, tuple(dict.fromkeys(windows))
        self._dtype, self._device = dtype, device

    def plan(self, decode: Sequence[RowSpan], prefill: Sequence[RowSpan]) -> StepPlan:
        """`decode` rows have one token each. The block tables must cover every token of the step."""
        places = [self._places(span) for span in (*decode, *prefill)]
        write = np.concatenate(places) if places else np.zeros(0, np.int64)
        windows = {w: WindowPlan(self._groups(decode, w), self._spans(len(decode), prefill, w)) for w in self._windows}
        return StepPlan(self._tensor(write), len(write), windows)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """To the device without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)

    def _places(self, span: RowSpan) -> np.ndarray:
        at = np.arange(span.start, span.start + span.num_tokens)
        return span.blocks[at // self._block_size].astype(np.int64) * self._block_size + at % self._block_size

    def _groups(self, rows: Sequence[RowSpan], window: int | None) -> list[DecodeGroup]:
        """Group rows by padded length, which depends on the row alone: its result does not depend on batch mates."""
        by_size: dict[int, list[tuple[int, int, int]]] = {}
        for i, row in enumerate(rows):
            length = row.start + 1
            first = 0 if window is None else max(0, length - window) // self._block_size
            needed = -(-length // self._block_size) - first
            by_size.setdefault(self._padded(needed), []).append((i, first, needed))
        return [self._group(rows, members, padded, window) for padded, members in by_size.items()]

    def _padded(self, num_blocks: int) -> int:
        """Up to whole 32 tokens; coarser for long rows, so that there are few different lengths."""
        quantum = max(1, 32 // self._block_size)
        while num_blocks > 8 * quantum:
            quantum *= 2
        return -(-num_blocks // quantum) * quantum

    def _group(
        self, rows: Sequence[RowSpan], members: list[tuple[int, int, int]], padded: int, window: int | None
    ) -> DecodeGroup:
        table = np.zeros((len(members), padded), np.int64)
        for line, (i, first, needed) in enumerate(members):
            table[line, :needed] = rows[i].blocks[first : first + needed]
        index = np.array([i for i, _, _ in members])
        last = np.array([rows[i].start - first * self._block_size for i, first, _ in members])[:, None]
        key = np.arange(padded * self._block_size)[None, :]
        hidden = key > last
        if window is not None:
            hidden |= last - key >= window
        mask = np.where(hidden, np.float32("-inf"), np.float32(0))
        whole = index[-1] - index[0] + 1 == len(index)
        place = slice(int(index[0]), int(index[-1]) + 1) if whole else self._tensor(index)
        return DecodeGroup(
            place, len(members), self._tensor(table.ravel()), self._tensor(mask).to(self._dtype)[:, None, None, :]
        )

    def _spans(self, offset: int, rows: Sequence[RowSpan], window: int | None) -> list[PrefillSpan]:
        spans = []
        for row in rows:
            spans.append(self._span(slice(offset, offset + row.num_tokens), row, window))
            offset += row.num_tokens
        return spans

    def _span(self, tokens: slice, row: RowSpan, window: int | None) -> PrefillSpan:
        narrow = window is not None and row.num_tokens > window
        if row.start == 0:
            mask = self._mask(row.num_tokens, 0, row.num_tokens, 0, window) if narrow else None
            return PrefillSpan(tokens, None, row.num_tokens, mask)
        first = 0 if window is None else max(0, row.start - window + 1) // self._block_size
        begin, end = first * self._block_size, row.start + row.num_tokens
        blocks = row.blocks[first : -(-end // self._block_size)].astype(np.int64)
        mask = self._mask(row.num_tokens, row.start, end - begin, begin, window)
        return PrefillSpan(tokens, self._tensor(blocks), end - begin, mask)

    def _mask(self, queries: int, first_query: int, keys: int, first_key: int, window: int | None) -> torch.Tensor:
        return causal_mask(queries, first_query, keys, first_key, window, self._dtype, self._device)
