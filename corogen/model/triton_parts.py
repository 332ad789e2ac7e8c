"""The small operations between a model's matrix products as single kernels, rounded where model classes round."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from corogen.model.triton_prefetch import COUNTS, ahead, fetch_ahead

#: bytes of the next product's weight that are asked for beside a norm, and beside an activation
NORM_AHEAD = 8 << 20
SILU_AHEAD = 8 << 20


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
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    early: bool,
    upcoming: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + residual, rounded, and the norm of that; both [1, T, n]. `upcoming`: weights that are read next."""
    size = x.shape[-1]
    x, residual = x.contiguous(), residual.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // size
    more = ahead(upcoming, NORM_AHEAD, rows, x)
    _sum_and_rms_norm[(rows + more.programs,)](
        x,
        residual,
        weight,
        total,
        out,
        eps,
        rows,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        EARLY=early,
        num_warps=1 if size <= 256 else 4 if size <= 2048 else 8,
        **more.arguments,
    )
    return total, out


def silu_mul(both: torch.Tensor, upcoming: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """silu(a) * b for a, b the halves of [..., 2 n]; contiguous in, [..., n] out. `upcoming`: weights read next."""
    size = both.shape[-1] // 2
    out = torch.empty((*both.shape[:-1], size), dtype=both.dtype, device=both.device)
    block = min(1024, triton.next_power_of_2(size))
    rows = both.numel() // (2 * size)
    blocks, more = triton.cdiv(size, block), ahead(upcoming, SILU_AHEAD, rows, both)
    grid = (rows + triton.cdiv(more.programs, blocks), blocks)
    _silu_mul[grid](both, out, rows, SIZE=size, BLOCK=block, num_warps=4, **more.arguments)
    return out


def matrix_vector(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """weight [n, k] times x [..., k], which has one row; returns [..., n]."""
    size, inner = weight.shape
    rows, block = (4, 1024) if size < 8192 else (16, 512) if inner <= 2048 else (8, 512)
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    _matrix_vector[(triton.cdiv(size, rows),)](
        x.contiguous(),
        weight,
        out if bias is None else bias,
        out,
        size,
        weight.stride(0),
        INNER=inner,
        BIAS=bias is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _matrix_vector(
    x,
    weight,
    bias,
    out,
    size,
    row_stride,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    inside = row < size
    line = weight + row.to(tl.int64)[:, None] * row_stride + i[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, INNER, BLOCK, num_stages=3):
        if INNER % BLOCK == 0:
            w = tl.load(line + start, mask=inside[:, None], other=0.0)
            part = tl.load(x + start + i)
        else:
            w = tl.load(line + start, mask=inside[:, None] & (start + i < INNER)[None, :], other=0.0)
            part = tl.load(x + start + i, mask=start + i < INNER, other=0.0)
        acc += w.to(tl.float32) * part.to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=inside)


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


@triton.jit(do_not_specialize=["rows", *COUNTS])
def _sum_and_rms_norm(
    x,
    residual,
    weight,
    total,
    out,
    eps,
    rows,
    near,
    near_count,
    near_per_row,
    near_row_bytes,
    far,
    far_count,
    far_per_row,
    far_row_bytes,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD > 0:
        if tl.program_id(0) >= rows:
            program, programs = tl.program_id(0) - rows, tl.num_programs(0) - rows
            fetch_ahead(program, programs, near, near_count, near_per_row, near_row_bytes, far, far_count, far_per_row, far_row_bytes, AHEAD)
            return
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


@triton.jit(do_not_specialize=["rows", *COUNTS])
def _silu_mul(
    both,
    out,
    rows,
    near,
    near_count,
    near_per_row,
    near_row_bytes,
    far,
    far_count,
    far_per_row,
    far_row_bytes,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD > 0:
        if tl.program_id(0) >= rows:
            blocks = tl.num_programs(1)
            program = (tl.program_id(0) - rows) * blocks + tl.program_id(1)
            programs = (tl.num_programs(0) - rows) * blocks
            fetch_ahead(program, programs, near, near_count, near_per_row, near_row_bytes, far, far_count, far_per_row, far_row_bytes, AHEAD)
            return
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gate = tl.load(both + row * 2 * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * SIZE + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + i, (active * up).to(out.dtype.element_ty), mask=inside)
