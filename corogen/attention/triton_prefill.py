"""Causal attention of many tokens a sequence over the paged cache, which holds this step's keys already.

Chunks of prompts, prompts behind a cached prefix and whole prompts are all the same to it. Its work is cut into
*tiles*: neighbouring tokens of one sequence, with the query heads of one kv head as further rows.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from corogen.attention.base import Options
from corogen.attention.triton_parts import accumulate, first_high, heads_of, option_arguments, pages, read, scores

#: rows of a tile: tokens times query heads of one kv head
_ROWS = 64


def tokens_per_tile(group: int) -> int:
    """Tokens of one tile, for layers of at most `group` query heads a kv head."""
    return max(1, _ROWS // (1 << (group - 1).bit_length()))


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    tile_tokens: int,
    tables: torch.Tensor,
    options: Options,
) -> None:
    """Fill `out` [T, Hq, Dv] at the tokens of the tiles, from q [1, Hq, T, D].

    `tiles` [n, 4] are (row of `tables` or -1 for none, first token in q, number of tokens, position of the first).
    """
    heads = heads_of(q, keys, values)
    group_rows = 1 << (heads.group - 1).bit_length()
    narrow = heads.key_padded * keys.element_size() > 256
    _prefill[(tiles.shape[0], heads.kv_heads)](
        q,
        keys,
        values,
        out,
        tiles,
        tables,
        q.stride(2),
        q.stride(1),
        tables.stride(0),
        KV_HEADS=heads.kv_heads,
        GROUP=heads.group,
        GROUP_ROWS=group_rows,
        ROWS=max(16, tile_tokens * group_rows),
        DIM=heads.key_dim,
        PADDED=heads.key_padded,
        DIM_V=heads.value_dim,
        PADDED_V=heads.value_padded,
        PAGE=keys.shape[1],
        BLOCK=heads.block,
        num_warps=4,
        num_stages=2 if narrow else 3,
        **option_arguments(options, q),
    )


@triton.jit
def _prefill(
    q,
    keys,
    values,
    out,
    tiles,
    tables,
    q_token,
    q_head,
    table_width,
    sinks,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    tile, kv_head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    row, first, count, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    if row < 0:
        return
    table = tables + row.to(tl.int64) * table_width
    r, d, dv = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, PADDED_V)
    token, g = r // GROUP_ROWS, r % GROUP_ROWS
    valid, head = (token < count) & (g < GROUP), kv_head * GROUP + g
    line = (first + token).to(tl.int64)
    at = (line * q_token + head * q_head)[:, None] + d[None, :]
    queries = tl.load(q + at, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
    high, total = first_high(sinks, head, valid, ROWS, SINKS)
    acc = tl.zeros([ROWS, PADDED_V], tl.float32)

    position, end = start + token, start + count
    begin = start * 0
    # keys that every token of the tile sees need no mask
    plain = (start + 1) // BLOCK * BLOCK
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK * BLOCK
        plain = begin
    for at_key in range(begin, plain, BLOCK):
        key = at_key + tl.arange(0, BLOCK)
        wanted = key >= 0
        places = pages(table, at_key, wanted, PAGE, BLOCK, True)
        s = scores(queries, read(keys, places, wanted, kv_head, KV_HEADS, DIM, PADDED), scale, softcap, SOFTCAP)
        v = read(values, places, wanted, kv_head, KV_HEADS, DIM_V, PADDED_V)
        high, total, acc = accumulate(s, v, high, total, acc)
    for at_key in range(plain, end, BLOCK):
        key = at_key + tl.arange(0, BLOCK)
        wanted = key < end
        places = pages(table, at_key, wanted, PAGE, BLOCK, True)
        s = scores(queries, read(keys, places, wanted, kv_head, KV_HEADS, DIM, PADDED), scale, softcap, SOFTCAP)
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (position[:, None] - key[None, :] < WINDOW)
        s = tl.where(seen, s, float("-inf"))
        v = read(values, places, wanted, kv_head, KV_HEADS, DIM_V, PADDED_V)
        high, total, acc = accumulate(s, v, high, total, acc)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + (line * (KV_HEADS * GROUP) + head)[:, None] * DIM_V + dv[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=valid[:, None] & (dv < DIM_V)[None, :])
