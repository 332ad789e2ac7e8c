"""The small operations between a model's matrix products as single kernels, rounded where model classes round."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, early: bool) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension of x [1, T, n] or [1, T, heads, n].

    With `early` the normalised value is rounded to x's dtype before the product with the weight.
    """
    heads = x.shape[2] if x.ndim == 4 else 1
    size = x.shape[-1]
    if x.stride(-1) != 1 or x.shape[0] != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm[(x.numel() // size,)](
        x,
        weight,
        out,
        x.stride(1),
        x.stride(2) if x.ndim == 4 else 0,
        eps,
        HEADS=heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        EARLY=early,
        num_warps=1 if size <= 256 else 4 if size <= 2048 else 8,
    )
    return out


def sum_and_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, early: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + residual, rounded, and the norm of that; both [1, T, n]."""
    size = x.shape[-1]
    x, residual = x.contiguous(), residual.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    _sum_and_rms_norm[(x.numel() // size,)](
        x,
        residual,
        weight,
        total,
        out,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        EARLY=early,
        num_warps=1 if size <= 256 else 4 if size <= 2048 else 8,
    )
    return total, out


def silu_mul(both: torch.Tensor) -> torch.Tensor:
    """silu(a) * b for a, b the halves of [..., 2 n]; contiguous in, [..., n] out."""
    size = both.shape[-1] // 2
    out = torch.empty((*both.shape[:-1], size), dtype=both.dtype, device=both.device)
    block = min(1024, triton.next_power_of_2(size))
    rows = both.numel() // (2 * size)
    _silu_mul[(rows, triton.cdiv(size, block))](both, out, SIZE=size, BLOCK=block, num_warps=4)
    return out


class Norm(NamedTuple):
    """An RMS norm of what a product is given, as in `rms_norm`."""

    weight: torch.Tensor
    eps: float
    early: bool


def matrix_vector(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """weight [n, k] times x [..., k], which has one row; returns [..., n].

    With `norm` x is normalised before; with `gated` silu(a) * b is returned for the halves a, b of the product; a
    `residual` is added. Everything is rounded where separate operations would round.
    """
    size, inner = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    rows, block = _tile(weight.shape[0], inner, gated)
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    _matrix_vector[(triton.cdiv(size, rows),)](
        x.contiguous(),
        weight,
        out if bias is None else bias,
        out if norm is None else norm.weight,
        out if residual is None else residual.contiguous(),
        out,
        size,
        weight.stride(0),
        0.0 if norm is None else norm.eps,
        INNER=inner,
        PADDED=triton.next_power_of_2(inner),
        BIAS=bias is not None,
        NORM=norm is not None,
        EARLY=norm is not None and norm.early,
        GATED=gated,
        ADD=residual is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return out


def _tile(size: int, inner: int, gated: bool) -> tuple[int, int]:
    """Rows of the result and columns of the weight that a program has at a time."""
    rows, block = (4, 1024) if size < 8192 else (16, 512) if inner <= 2048 else (8, 512)
    return (max(1, rows // 2) if gated else rows), block


@triton.jit
def _part(x, start, i, INNER: tl.constexpr, BLOCK: tl.constexpr):
    if INNER % BLOCK == 0:
        return tl.load(x + start + i)
    return tl.load(x + start + i, mask=start + i < INNER, other=0.0)


@triton.jit
def _part_of_rows(line, start, i, inside, INNER: tl.constexpr, BLOCK: tl.constexpr):
    if INNER % BLOCK == 0:
        return tl.load(line + start, mask=inside[:, None], other=0.0)
    return tl.load(line + start, mask=inside[:, None] & (start + i < INNER)[None, :], other=0.0)


@triton.jit
def _matrix_vector(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    size,
    row_stride,
    eps,
    INNER: tl.constexpr,
    PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    kind = out.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    inside = row < size
    line = weight + row.to(tl.int64)[:, None] * row_stride + i[None, :]
    second = line + size.to(tl.int64) * row_stride
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    acc_b = tl.zeros([ROWS, BLOCK], tl.float32)
    if NORM:
        every = tl.arange(0, PADDED)
        wide = tl.load(x + every, mask=every < INNER, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / INNER + eps)
    for start in tl.range(0, INNER, BLOCK, num_stages=3):
        w = _part_of_rows(line, start, i, inside, INNER, BLOCK)
        part = _part(x, start, i, INNER, BLOCK).to(tl.float32)
        if NORM:
            part = part * scale
            if EARLY:
                part = part.to(kind).to(tl.float32)
            part = (part * _part(norm, start, i, INNER, BLOCK).to(tl.float32)).to(kind).to(tl.float32)
        acc += w.to(tl.float32) * part[None, :]
        if GATED:
            w = _part_of_rows(second, start, i, inside, INNER, BLOCK)
            acc_b += w.to(tl.float32) * part[None, :]
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(acc_b, 1)
        if BIAS:
            up += tl.load(bias + size + row, mask=inside, other=0.0).to(tl.float32)
        gate = total.to(kind).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        total = active * up.to(kind).to(tl.float32)
    if ADD:
        total = total.to(kind).to(tl.float32) + tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(kind), mask=inside)


@triton.jit
def _rms_norm(
    x,
    weight,
    out,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    wide = tl.load(x + row // HEADS * token_stride + row % HEADS * head_stride + i, mask=inside, other=0.0)
    wide = wide.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if EARLY:
        scaled = scaled.to(out.dtype.element_ty).to(tl.float32)
    result = scaled * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_and_rms_norm(
    x, residual, weight, total, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    wide = tl.load(x + start + i, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(residual + start + i, mask=inside, other=0.0).to(tl.float32)
    rounded = wide.to(out.dtype.element_ty)
    tl.store(total + start + i, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if EARLY:
        scaled = scaled.to(out.dtype.element_ty).to(tl.float32)
    result = scaled * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + i, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(both, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gate = tl.load(both + row * 2 * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * SIZE + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + i, (active * up).to(out.dtype.element_ty), mask=inside)
