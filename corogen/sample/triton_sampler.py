"""Draws one id a row in one kernel: temperature, top-k, top-p and min-p without sorting a vocabulary.

Which ids are left is decided by a lowest value that is found by bisection over the bits of the numbers themselves, so
it is exact, and equal values stay or go together.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import torch
import triton
import triton.language as tl


def draw(logits: torch.Tensor, settings: torch.Tensor, ids: torch.Tensor) -> None:
    """Overwrite ids [n] (int64) of the rows in `settings` by ids drawn from logits [n, vocabulary].

    `settings` [rows, 6] are float64: row, temperature, top_k (0: off), top_p, min_p, random number in [0, 1). The id is
    found by inverting the distribution in the order of ids.
    """
    bits, vocab = 8 * logits.element_size(), logits.shape[1]
    block = 8192 if bits == 16 else 4096
    _draw[(len(settings),)](logits, settings, ids, vocab, logits.stride(0), BITS=bits, BLOCK=block, num_warps=16)


@triton.jit
def _keys(x, BITS: tl.constexpr):
    """Whole numbers in the order of the values."""
    if BITS == 16:
        i = x.to(tl.int16, bitcast=True).to(tl.int32)
        key = i ^ ((i >> 31) & 0x7FFF)
    else:
        i = x.to(tl.int32, bitcast=True)
        key = i ^ ((i >> 31) & 0x7FFFFFFF)
    return key


@triton.jit
def _weights(x, high, temperature):
    """exp((x - high) / temperature), at most 1."""
    s = (x.to(tl.float32) - high) / temperature
    return tl.exp(tl.where(s != s, 0.0, s))


@triton.jit
def _held(line, vocab, high, temperature, lowest, COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """How many ids have a key of at least `lowest`, or how much weight they have."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(line + i, mask=i < vocab, other=float("-inf"))
        inside = (_keys(x, BITS) >= lowest) & (i < vocab)
        total += tl.where(inside, 1.0 if COUNT else _weights(x, high, temperature), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _lowest(
    line, vocab, high, temperature, floor, wanted, COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key, at least `floor`, such that the ids from it on hold what is wanted."""
    below, above = floor.to(tl.int64), (1 << (BITS - 1)) + tl.zeros_like(floor).to(tl.int64)
    while above - below > 1:
        middle = (below + above) >> 1
        if _held(line, vocab, high, temperature, middle, COUNT, BITS, BLOCK) >= wanted:
            below = middle
        else:
            above = middle
    return below


@triton.jit
def _draw(logits, settings, ids, vocab, row_stride, BITS: tl.constexpr, BLOCK: tl.constexpr):
    setting = settings + tl.program_id(0) * 6
    row = tl.load(setting).to(tl.int64)
    temperature, min_p = tl.load(setting + 1).to(tl.float32), tl.load(setting + 4).to(tl.float32)
    top_k, top_p, noise = tl.load(setting + 2).to(tl.int32), tl.load(setting + 3).to(tl.float32), tl.load(setting + 5)
    line = logits + row * row_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(line + i, mask=i < vocab, other=float("-inf")).to(tl.float32))
    high = tl.max(best, 0)

    lowest = tl.full((), -(1 << (BITS - 1)), tl.int64)
    if (top_k > 0) & (top_k < vocab):
        lowest = _lowest(line, vocab, high, temperature, lowest, top_k.to(tl.float32), True, BITS, BLOCK)
    if top_p < 1.0:
        wanted = top_p * _held(line, vocab, high, temperature, lowest, False, BITS, BLOCK)
        lowest = _lowest(line, vocab, high, temperature, lowest, wanted, False, BITS, BLOCK)

    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        total += _share(line, start, vocab, high, temperature, lowest, min_p, BITS, BLOCK)[1].to(tl.float64)
    target = noise * total
    # the first id at which the sum passes the target; the last with any weight, should rounding leave none
    chosen, passed = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
    found = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        weights, share = _share(line, start, vocab, high, temperature, lowest, min_p, BITS, BLOCK)
        if (found == 0) & (share > 0.0):
            i = start + tl.arange(0, BLOCK)
            if passed + share.to(tl.float64) > target:
                behind = passed + tl.cumsum(weights, 0).to(tl.float64) > target
                first = tl.min(tl.where(behind & (weights > 0.0), i, 2147483647), 0)
                last = tl.max(tl.where(weights > 0.0, i, 0), 0)
                chosen = tl.minimum(first, last)
                found = tl.full((), 1, tl.int32)
            else:
                chosen = tl.max(tl.where(weights > 0.0, i, 0), 0)
        passed += share.to(tl.float64)
    tl.store(ids + row, chosen.to(tl.int64))


@triton.jit
def _share(line, start, vocab, high, temperature, lowest, min_p, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of one stretch of ids, and their sum."""
    i = start + tl.arange(0, BLOCK)
    x = tl.load(line + i, mask=i < vocab, other=float("-inf"))
    weights = _weights(x, high, temperature)
    kept = (_keys(x, BITS) >= lowest) & (weights >= min_p) & (i < vocab)
    weights = tl.where(kept, weights, 0.0)
    return weights, tl.sum(weights, 0)
