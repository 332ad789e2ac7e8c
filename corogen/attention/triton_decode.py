"""Attention of one token a sequence over the paged cache.

A program has the query heads of one kv head of one row and a share of the row's keys. Which shares there are is
computed on the device from the rows' lengths, once a step, so one long row among short ones does not hold up the step,
and no program starts for nothing.
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

#: numbers of one share: row, slot, share of the row, shares of the row, keys of the row; rest unused
_ITEM = 8


def max_shares(rows: int, kv_heads: int) -> int:
    """Rows of the table that `share_out` fills."""
    return rows + min(128, max(64, _PROGRAMS // kv_heads - rows))


def share_out(rows: torch.Tensor, lengths: torch.Tensor, shares: torch.Tensor, kv_heads: int) -> None:
    """Fill `shares` [max_shares, 8] for rows with the slots `rows` [B] that see `lengths` [B] keys, all int32.

    Rows that begin the list are begun first, so long ones had better be in front.
    """
    batch = rows.shape[0]
    padded_rows = triton.next_power_of_2(batch)
    _share_out[(1,)](
        rows,
        lengths,
        shares,
        batch,
        shares.shape[0],
        ITEM=_ITEM,
        LEAST=_least_keys(batch * kv_heads),
        ROWS=padded_rows,
        TILE=max(1, 1024 // padded_rows),
        num_warps=4,
    )


#: programs that keep a large GPU busy
_PROGRAMS = 528


def _least_keys(programs: int) -> int:
    """The fewest keys that are worth a share, for so many rows times kv heads."""
    return 128 if programs <= 64 else 256 if programs <= 256 else 1024


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    shares: torch.Tensor,
    tables: torch.Tensor,
    arrived: torch.Tensor,
    options: Options,
) -> None:
    """Fill `out` [T, Hq, Dv] for the first tokens of q [1, Hq, T, D], which are the rows of `shares`.

    `shares` are from `share_out`; slots are rows of `tables` [slots, width]. A row that sees no key gets zeros. Keys
    and values are [blocks, block_size, Hkv, D]. `arrived` [at least rows * Hkv] counts the shares of a row that are
    done; it is zero before and after.
    """
    heads, count = heads_of(q, keys, values), shares.shape[0]
    query_heads = heads.kv_heads * heads.group
    part = out.new_empty((count, query_heads, heads.value_dim + 2), dtype=torch.float32)
    group = 1 << (heads.group - 1).bit_length()
    _decode[(heads.kv_heads, count)](
        q,
        keys,
        values,
        out,
        part,
        arrived,
        shares,
        tables,
        q.stride(2),
        q.stride(1),
        tables.stride(0),
        KV_HEADS=heads.kv_heads,
        HEADS=query_heads,
        GROUP=heads.group,
        GROUP_ROWS=group,
        ROWS=padded(heads.group),
        DIM=heads.key_dim,
        PADDED=heads.key_padded,
        DIM_V=heads.value_dim,
        PADDED_V=heads.value_padded,
        PAGE=keys.shape[1],
        BLOCK=heads.block,
        ITEM=_ITEM,
        TILE=max(1, min(8, 4096 // (group * heads.value_padded))),
        **_launch(heads.block * heads.key_padded * keys.element_size()),
        **option_arguments(options, q),
    )


def _launch(tile_bytes: int) -> dict[str, int]:
    small = tile_bytes <= 8192
    return {"num_warps": 2 if small else 4, "num_stages": 5 if small else 3}


@triton.jit(do_not_specialize=["batch", "count"])
def _share_out(
    rows,
    lengths,
    shares,
    batch,
    count,
    ITEM: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.arange(0, ROWS)
    inside = i < batch
    length = tl.load(lengths + i, mask=inside, other=0)
    slot = tl.load(rows + i, mask=inside, other=-1)
    spare = count - batch
    # as many shares in all as there is room for at most: a row's last share may be smaller than the others
    keys = tl.maximum(LEAST, (tl.sum(length, 0) + spare - 1) // spare)
    wanted = tl.where(inside, tl.maximum((length + keys - 1) // keys, 1), 0)
    first = tl.cumsum(wanted, 0) - wanted
    share = tl.arange(0, TILE)
    for start in range(0, tl.max(wanted, 0), TILE):
        one = start + share[None, :]
        real = one < wanted[:, None]
        at = shares + (first[:, None] + one) * ITEM
        tl.store(at, i[:, None] + one * 0, mask=real)
        tl.store(at + 1, slot[:, None] + one * 0, mask=real)
        tl.store(at + 2, one + i[:, None] * 0, mask=real)
        tl.store(at + 3, wanted[:, None] + one * 0, mask=real)
        tl.store(at + 4, length[:, None] + one * 0, mask=real)
    for start in range(tl.sum(wanted, 0), count, ROWS):
        tl.store(shares + (start + i) * ITEM, i * 0 - 1, mask=start + i < count)


@triton.jit
def _decode(
    q,
    keys,
    values,
    out,
    part,
    arrived,
    shares,
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
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    kv_head, item = tl.program_id(0), tl.program_id(1)
    place = shares + item * ITEM
    row, slot, split = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    count, length = tl.load(place + 3), tl.load(place + 4)
    if row < 0:
        return
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = ((length - first + count - 1) // count + BLOCK - 1) // BLOCK * BLOCK
    table = tables + tl.maximum(slot, 0).to(tl.int64) * table_width
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
        base = part + (item.to(tl.int64) * HEADS + head) * (DIM_V + 2)
        tl.store(base[:, None] + dv[None, :], acc, mask=stored)
        tl.store(base + DIM_V, high, mask=g < GROUP)
        tl.store(base + DIM_V + 1, total, mask=g < GROUP)
        tl.debug_barrier()  # all of this program's parts are written before it counts itself
        done = arrived + row * KV_HEADS + kv_head
        if tl.atomic_add(done, 1, sem="acq_rel") == count - 1:
            tl.store(done, 0)
            whole = part + ((item - split).to(tl.int64) * HEADS + kv_head * GROUP) * (DIM_V + 2)
            target = out + (row.to(tl.int64) * HEADS + kv_head * GROUP) * DIM_V
            _combine(whole, target, count, HEADS, GROUP, GROUP_ROWS, DIM_V, PADDED_V, TILE)


@triton.jit
def _combine(
    parts,
    out,
    count,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up the shares of one kv head's query heads: `parts` and `out` are where its first one begins."""
    g, split, dv = tl.arange(0, GROUP_ROWS), tl.arange(0, TILE), tl.arange(0, PADDED_V)
    high = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, PADDED_V], tl.float32)
    for start in range(0, count, TILE):
        wanted = (g < GROUP)[:, None] & (start + split < count)[None, :]
        here = parts + (g[:, None] + (start + split)[None, :] * HEADS) * (DIM_V + 2)
        # past the first-level cache, which may hold what was there before another program wrote
        highs = tl.load(here + DIM_V, mask=wanted, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(here + DIM_V + 1, mask=wanted, other=0.0, cache_modifier=".cg")
        every = wanted[:, :, None] & (dv < DIM_V)[None, None, :]
        values = tl.load(here[:, :, None] + dv[None, None, :], mask=every, other=0.0, cache_modifier=".cg")
        new = tl.maximum(high, tl.max(highs, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight, fade = tl.exp2(highs - base[:, None]), tl.exp2(high - base)
        total = total * fade + tl.sum(totals * weight, 1)
        acc = acc * fade[:, None] + tl.sum(values * weight[:, :, None], 1)
        high = new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + g[:, None] * DIM_V + dv[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(g < GROUP)[:, None] & (dv < DIM_V)[None, :])
