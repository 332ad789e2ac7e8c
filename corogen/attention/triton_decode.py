"""Attention of one token a sequence over the paged cache.

A program has the query heads of one kv head of one row and a share of the row's keys. How many shares a row gets is
computed on the device from its length, so one long row among short ones does not hold up the step.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from corogen.attention.base import Options
from corogen.attention.triton_parts import (
    accumulate,
    first_high,
    heads_of,
    option_arguments,
    padded,
    pages,
    read,
    scores,
)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    arrived: torch.Tensor,
    options: Options,
) -> None:
    """Fill `out` [T, Hq, Dv] for the first len(rows) tokens of q [1, Hq, T, D].

    `rows` [B] are the rows of `tables` [slots, width]; `lengths` [B] are the keys each sees, its own token included.
    A row of length 0 gets zeros. Keys and values are [blocks, block_size, Hkv, D]. `arrived` [at least B * Hkv] counts
    the shares of a row that are done; it is zero before and after.
    """
    heads, batch = heads_of(q, keys, values), rows.shape[0]
    splits, split_tokens = _splits(batch * heads.kv_heads)
    query_heads = heads.kv_heads * heads.group
    part = out.new_empty((batch, query_heads, splits, heads.value_dim + 2) if splits > 1 else (1,), dtype=torch.float32)
    shape = {
        "HEADS": query_heads,
        "DIM_V": heads.value_dim,
        "PADDED_V": heads.value_padded,
        "BLOCK": heads.block,
        "SPLITS": splits,
        "SPLIT_TOKENS": split_tokens,
        "WINDOW": options.window or 0,
    }
    _decode[(batch, heads.kv_heads, splits)](
        q,
        keys,
        values,
        out,
        part,
        arrived,
        rows,
        lengths,
        tables,
        q.stride(2),
        q.stride(1),
        tables.stride(0),
        KV_HEADS=heads.kv_heads,
        GROUP=heads.group,
        ROWS=padded(heads.group),
        DIM=heads.key_dim,
        PADDED=heads.key_padded,
        PAGE=keys.shape[1],
        num_warps=4,
        num_stages=5 if heads.block * heads.key_padded * keys.element_size() <= 8192 else 3,
        **{**shape, **option_arguments(options, q)},
    )


def _splits(programs: int) -> tuple[int, int]:
    """The most shares of a row, and the fewest keys that are worth one, for so many rows times kv heads."""
    if programs <= 64:
        return 32, 128
    if programs <= 256:
        return 16, 256
    return 8, 1024


@triton.jit
def _shares(length, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """First visible key, keys a share, number of shares."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    seen = length - first
    count = tl.minimum(tl.maximum((seen + SPLIT_TOKENS - 1) // SPLIT_TOKENS, 1), SPLITS)
    share = (seen + count - 1) // count
    return first, (share + BLOCK - 1) // BLOCK * BLOCK, count


@triton.jit
def _decode(
    q,
    keys,
    values,
    out,
    part,
    arrived,
    rows,
    lengths,
    tables,
    q_token,
    q_head,
    table_width,
    sinks,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first, share, count = _shares(length, BLOCK, SPLITS, SPLIT_TOKENS, WINDOW)
    if split >= count:
        return
    table = tables + tl.maximum(tl.load(rows + row), 0).to(tl.int64) * table_width
    g, d, dv = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, PADDED_V)
    head = kv_head * GROUP + g
    at = row.to(tl.int64) * q_token + head[:, None] * q_head + d[None, :]
    queries = tl.load(q + at, mask=(g < GROUP)[:, None] & (d < DIM)[None, :], other=0.0)

    high, total = first_high(sinks, head, g < GROUP, ROWS, SINKS)
    if split > 0:
        high = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_V], tl.float32)
    end = tl.minimum(first + (split + 1) * share, length)
    for start in range(first + split * share, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        wanted = key < end
        places = pages(table, start, wanted, PAGE, BLOCK, WINDOW == 0)
        s = scores(queries, read(keys, places, wanted, kv_head, KV_HEADS, DIM, PADDED), scale, softcap, SOFTCAP)
        s = tl.where(wanted[None, :], s, float("-inf"))
        v = read(values, places, wanted, kv_head, KV_HEADS, DIM_V, PADDED_V)
        high, total, acc = accumulate(s, v, high, total, acc)

    stored = (g < GROUP)[:, None] & (dv < DIM_V)[None, :]
    line = row.to(tl.int64) * HEADS + head
    if count == 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + line[:, None] * DIM_V + dv[None, :], acc.to(out.dtype.element_ty), mask=stored)
    else:
        base = part + (line * SPLITS + split) * (DIM_V + 2)
        tl.store(base[:, None] + dv[None, :], acc, mask=stored)
        tl.store(base + DIM_V, high, mask=g < GROUP)
        tl.store(base + DIM_V + 1, total, mask=g < GROUP)
        tl.debug_barrier()  # all of this program's parts are written before it counts itself
        done = arrived + row * KV_HEADS + kv_head
        if tl.atomic_add(done, 1, sem="acq_rel") == count - 1:
            tl.store(done, 0)
            for i in range(GROUP):
                one = row.to(tl.int64) * HEADS + kv_head * GROUP + i
                _combine(part + one * SPLITS * (DIM_V + 2), out + one * DIM_V, count, DIM_V, PADDED_V, SPLITS)


@triton.jit
def _combine(parts, out, count, DIM_V: tl.constexpr, PADDED_V: tl.constexpr, SPLITS: tl.constexpr):
    """Add up one head's shares: `parts` and `out` are where the head's begin."""
    split, dv = tl.arange(0, SPLITS), tl.arange(0, PADDED_V)
    here = parts + split * (DIM_V + 2)
    wanted = split < count
    # past the first-level cache, which may hold what was there before another program wrote
    high = tl.load(here + DIM_V, mask=wanted, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(here + DIM_V + 1, mask=wanted, other=0.0, cache_modifier=".cg")
    both = wanted[:, None] & (dv < DIM_V)[None, :]
    acc = tl.load(here[:, None] + dv[None, :], mask=both, other=0.0, cache_modifier=".cg")
    weight = tl.exp2(high - tl.max(high, 0))
    acc = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + dv, acc.to(out.dtype.element_ty), mask=dv < DIM_V)
