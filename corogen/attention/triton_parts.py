"""What the attention kernels have in common: reading pages, scores, and the running softmax.

Places in the cache are 64-bit wide everywhere: a cache can have more than 2^31 elements.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from corogen.attention.base import Options

LOG2E = tl.constexpr(1.4426950408889634)


class Heads(NamedTuple):
    """Shape of one layer, and the powers of two that its tiles are padded to."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    key_padded: int
    value_padded: int
    #: keys a tile
    block: int


def heads_of(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Heads:
    """q [1, Hq, T, D] over a cache of [blocks, block_size, Hkv, D] keys and values."""
    kv_heads, key_dim, value_dim = keys.shape[2], keys.shape[3], values.shape[3]
    row_bytes = max(key_dim, value_dim) * keys.element_size()
    block = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    return Heads(kv_heads, q.shape[1] // kv_heads, key_dim, value_dim, padded(key_dim), padded(value_dim), block)


def padded(size: int) -> int:
    """The next power of two; at least 16, which is the least that a matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length())


def option_arguments(options: Options, q: torch.Tensor) -> dict[str, object]:
    """A layer's wishes as kernel arguments."""
    return {
        "sinks": q if options.sinks is None else options.sinks,
        "scale": options.scaling,
        "softcap": options.softcap or 0.0,
        "WINDOW": options.window or 0,
        "SOFTCAP": options.softcap is not None,
        "SINKS": options.sinks is not None,
    }


@triton.jit
def pages(table, start, wanted, PAGE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Places in the cache of the BLOCK keys from `start` on, which is a multiple of BLOCK if ALIGNED."""
    if ALIGNED and PAGE % BLOCK == 0:
        return tl.load(table + start // PAGE).to(tl.int64) * PAGE + start % PAGE + tl.arange(0, BLOCK)
    key = start + tl.arange(0, BLOCK)
    block = tl.load(table + key // PAGE, mask=wanted, other=0)
    return block.to(tl.int64) * PAGE + key % PAGE


@triton.jit
def read(cache, places, wanted, head, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[places, PADDED] of one head; what is not wanted is zero."""
    d = tl.arange(0, PADDED)
    at = (places * HEADS + head)[:, None] * DIM + d[None, :]
    if PADDED == DIM:
        return tl.load(cache + at, mask=wanted[:, None], other=0.0)
    return tl.load(cache + at, mask=wanted[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def scores(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """[rows, keys], to the base of two."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    return s * LOG2E


@triton.jit
def accumulate(s, v, high, total, acc):
    """One tile more: `high` is the largest score so far, `total` the sum, `acc` the weighted values."""
    new = tl.maximum(high, tl.max(s, 1))
    # a row that has seen nothing yet keeps its weights at zero instead of -inf - -inf
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(s - base[:, None])
    fade = tl.exp2(high - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
def first_high(sinks, head, wanted, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """Before the first key: the heads' sinks, which have a score and no value."""
    if SINKS:
        high = tl.load(sinks + head, mask=wanted, other=0.0).to(tl.float32) * LOG2E
        return high, tl.full([ROWS], 1.0, tl.float32)
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
