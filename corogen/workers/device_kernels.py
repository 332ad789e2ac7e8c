"""Small kernels that keep a step's bookkeeping on the device."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 128


def apply_changes(state: torch.Tensor, changes: torch.Tensor, count: int) -> None:
    """state[changes[i]] = changes[count + i], for `count` i."""
    _apply_changes[(triton.cdiv(count, _BLOCK),)](state, changes, count, BLOCK=_BLOCK)


def prepare(
    token_slots: torch.Tensor,
    fresh: tuple[torch.Tensor, torch.Tensor] | None,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    last_tokens: torch.Tensor,
    block_size: int,
    last_position: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    row_lengths: torch.Tensor,
) -> None:
    """Fill `ids`, `positions` (int64) and `places` (int32) of T tokens, and `row_lengths` of the first B.

    `token_slots` [T] are slots or -1. A decode row takes its token, position and length from its slot, whose length
    grows by one. `fresh` are the others' positions (-1 for a decode row) and ids, [T] each; None: all are decode rows.
    """
    count = token_slots.shape[0]
    _prepare[(triton.cdiv(count, _BLOCK),)](
        token_slots,
        *(fresh or (token_slots, token_slots)),
        tables,
        lengths,
        last_tokens,
        ids,
        positions,
        places,
        row_lengths,
        count,
        row_lengths.shape[0],
        tables.stride(0),
        last_position,
        PAGE=block_size,
        ALL_DECODE=fresh is None,
        BLOCK=_BLOCK,
    )


def remember(last_tokens: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor) -> None:
    """last_tokens[slots[i]] = ids[i], where there is a slot."""
    count = slots.shape[0]
    _remember[(triton.cdiv(count, _BLOCK),)](last_tokens, slots, ids, count, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["count"])
def _apply_changes(state, changes, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(changes + i, mask=i < count, other=0)
    value = tl.load(changes + count + i, mask=i < count, other=0)
    tl.store(state + at, value, mask=i < count)


@triton.jit(do_not_specialize=["count", "row_count", "last_position"])
def _prepare(
    token_slots,
    fresh_positions,
    fresh_ids,
    tables,
    lengths,
    last_tokens,
    ids,
    positions,
    places,
    row_lengths,
    count,
    row_count,
    table_width,
    last_position,
    PAGE: tl.constexpr,
    ALL_DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = tl.load(token_slots + i, mask=inside, other=-1)
    real = slot >= 0
    decode = real
    if not ALL_DECODE:
        given = tl.load(fresh_positions + i, mask=inside, other=0)
        decode = real & (given < 0)
    position = tl.load(lengths + slot, mask=decode, other=0)
    token = tl.load(last_tokens + slot, mask=decode, other=0)
    tl.store(lengths + slot, position + 1, mask=decode)
    tl.store(row_lengths + i, tl.where(decode, position + 1, 0), mask=inside & (i < row_count))
    if not ALL_DECODE:
        position = tl.where(decode, position, tl.maximum(given, 0))
        token = tl.where(decode, token, tl.load(fresh_ids + i, mask=inside, other=0))
    block = tl.load(tables + tl.maximum(slot, 0).to(tl.int64) * table_width + position // PAGE, mask=real, other=0)
    tl.store(places + i, tl.where(real, block * PAGE + position % PAGE, -1), mask=inside)
    tl.store(ids + i, tl.where(real, token, 0).to(tl.int64), mask=inside)
    # a sequence that ended at the last position may be in one more step, whose token nobody wants
    tl.store(positions + i, tl.minimum(position, last_position).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _remember(last_tokens, slots, ids, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < count, other=-1)
    tl.store(last_tokens + slot, tl.load(ids + i, mask=i < count, other=0).to(tl.int32), mask=slot >= 0)
