"""Writes a step's keys and values into the cache, and turns queries and keys by their positions on the way."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from corogen.attention.base import HeadNorms
from corogen.attention.triton_parts import padded


def store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    norms: HeadNorms | None = None,
) -> None:
    """Store k and v [1, Hkv, T, D] at `places` [T] (block * block_size + offset, or -1 for nowhere).

    With `angles` (cosines and sines, [1, T, D] each, in the dtype of q) q is turned in place, and k as it is stored;
    with `norms` too, both are normalised before. Every product is rounded to the dtype, as model classes do.
    """
    cos, sin = angles or (q, q)
    q_weight, k_weight, eps, early = norms or (q, q, 0.0, True)
    kv_heads, dim, value_dim = k.shape[1], k.shape[3], v.shape[3]
    group = q.shape[1] // kv_heads
    _store[(places.shape[0], kv_heads)](
        q,
        k,
        v,
        cos,
        sin,
        q_weight,
        k_weight,
        keys,
        values,
        places,
        eps,
        q.stride(2),
        q.stride(1),
        k.stride(2),
        k.stride(1),
        v.stride(2),
        v.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=1 << (group - 1).bit_length(),
        DIM=dim,
        PADDED=padded(dim),
        HALF=padded(dim) // 2,
        DIM_V=value_dim,
        PADDED_V=padded(value_dim),
        TURN=angles is not None,
        NORM=norms is not None,
        EARLY=early,
        num_warps=1,
        enable_fp_fusion=False,  # a fused multiply-add would skip a rounding
    )


@triton.jit
def _turned(a, b, cos, sin, sign: tl.constexpr):
    """a * cos + sign * b * sin, each product rounded."""
    kind = a.dtype
    x = (a.to(tl.float32) * cos.to(tl.float32)).to(kind).to(tl.float32)
    y = (b.to(tl.float32) * sin.to(tl.float32)).to(kind).to(tl.float32)
    return (x + sign * y).to(kind)


@triton.jit
def _squares(x, axis: tl.constexpr):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis)


@triton.jit
def _weighted(x, scale, weight, EARLY: tl.constexpr):
    scaled = x.to(tl.float32) * scale
    if EARLY:
        scaled = scaled.to(x.dtype).to(tl.float32)
    return (scaled * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _store(
    q,
    k,
    v,
    cos,
    sin,
    q_weight,
    k_weight,
    keys,
    values,
    places,
    eps,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + token).to(tl.int64)
    line = tl.maximum(place, 0) * KV_HEADS + head
    real = place >= 0
    dv = tl.arange(0, PADDED_V)
    value = tl.load(v + token * v_token + head * v_head + dv, mask=dv < DIM_V)
    tl.store(values + line * DIM_V + dv, value, mask=(dv < DIM_V) & real)
    old = k + token * k_token + head * k_head
    new = keys + line * DIM
    if TURN:
        d = tl.arange(0, HALF)
        inside = d < DIM // 2
        cos_a = tl.load(cos + token * DIM + d, mask=inside)
        cos_b = tl.load(cos + token * DIM + DIM // 2 + d, mask=inside)
        sin_a = tl.load(sin + token * DIM + d, mask=inside)
        sin_b = tl.load(sin + token * DIM + DIM // 2 + d, mask=inside)
        a, b = tl.load(old + d, mask=inside, other=0.0), tl.load(old + DIM // 2 + d, mask=inside, other=0.0)
        if NORM:
            scale = tl.rsqrt((_squares(a, 0) + _squares(b, 0)) / DIM + eps)
            a = _weighted(a, scale, tl.load(k_weight + d, mask=inside, other=0.0), EARLY)
            b = _weighted(b, scale, tl.load(k_weight + DIM // 2 + d, mask=inside, other=0.0), EARLY)
        tl.store(new + d, _turned(a, b, cos_a, sin_a, -1.0), mask=inside & real)
        tl.store(new + DIM // 2 + d, _turned(b, a, cos_b, sin_b, 1.0), mask=inside & real)
        g = tl.arange(0, ROWS)
        wanted = (g < GROUP)[:, None] & inside[None, :]
        at = q + token * q_token + (head * GROUP + g)[:, None] * q_head + d[None, :]
        a, b = tl.load(at, mask=wanted, other=0.0), tl.load(at + DIM // 2, mask=wanted, other=0.0)
        if NORM:
            scale = tl.rsqrt((_squares(a, 1) + _squares(b, 1)) / DIM + eps)[:, None]
            a = _weighted(a, scale, tl.load(q_weight + d, mask=inside, other=0.0)[None, :], EARLY)
            b = _weighted(b, scale, tl.load(q_weight + DIM // 2 + d, mask=inside, other=0.0)[None, :], EARLY)
        tl.store(at, _turned(a, b, cos_a[None, :], sin_a[None, :], -1.0), mask=wanted)
        tl.store(at + DIM // 2, _turned(b, a, cos_b[None, :], sin_b[None, :], 1.0), mask=wanted)
    else:
        d = tl.arange(0, PADDED)
        tl.store(new + d, tl.load(old + d, mask=d < DIM), mask=(d < DIM) & real)
