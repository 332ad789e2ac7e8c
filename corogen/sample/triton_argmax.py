"""The best id of each row in two small kernels, the second of which also notes it for the next step."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 8192


def choose_best(logits: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, ids: torch.Tensor) -> None:
    """ids[i] = the best of logits[i], the lowest of several; also last_tokens[slots[i]] where there is a slot.

    `logits` [n, vocabulary] have contiguous rows, `slots` [n] are int32 (-1: none), `ids` [n] int64.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _best_of_chunks[(chunks, rows)](logits, best, where, vocab, logits.stride(0), chunks, BLOCK=_CHUNK, num_warps=8)
    padded = triton.next_power_of_2(chunks)
    _best_of_rows[(rows,)](best, where, slots, last_tokens, ids, chunks, vocab, BLOCK=padded, num_warps=1)


@triton.jit
def _best_of_chunks(logits, best, where, vocab, row_stride, chunks, BLOCK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(value, 0)
    tl.store(best + row * chunks + chunk, top)
    tl.store(where + row * chunks + chunk, tl.min(tl.where(value == top, i, vocab - 1), 0))


@triton.jit
def _best_of_rows(best, where, slots, last_tokens, ids, chunks, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    value = tl.load(best + row * chunks + i, mask=i < chunks, other=float("-inf"))
    place = tl.load(where + row * chunks + i, mask=i < chunks, other=vocab - 1)
    token = tl.min(tl.where(value == tl.max(value, 0), place, vocab - 1), 0)
    tl.store(ids + row, token.to(tl.int64))
    slot = tl.load(slots + row)
    tl.store(last_tokens + slot, token, mask=slot >= 0)
