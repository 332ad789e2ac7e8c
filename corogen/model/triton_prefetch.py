"""Reads the beginning of coming weights into the second-level cache while kernels run that leave the memory idle.

In small batches a step is bound by reading weights, and kernels between the products (norms, storing keys, attention
of few rows) hardly read anything. Some further programs of such a kernel only say what will be read next; that the
memory then works through on its own. Nothing waits for it, and results do not depend on it.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 (constants of a kernel are written large)

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

#: larger steps keep the memory busy by themselves
MAX_TOKENS = 64

_PIECE = tl.constexpr(512)
_BLOCK = tl.constexpr(256)


#: arguments of kernels that differ from product to product without another kernel being compiled
COUNTS = ("near_count", "near_per_row", "near_row_bytes", "far_count", "far_per_row", "far_row_bytes")


class Ahead(NamedTuple):
    """Up to two weights as arguments of a kernel, and how many programs it has for them."""

    programs: int
    arguments: dict[str, object]


def ahead(weights: Sequence[torch.Tensor], budget: int, tokens: int, like: torch.Tensor) -> Ahead:
    """So many bytes of `weights` (the first two at most, the first one first); `like` stands in for what is not."""
    found = []
    if tokens <= MAX_TOKENS and _can_prefetch(like.device):
        for weight in weights[:2]:
            count, per_row, row_bytes = _pieces(weight, budget)
            if count:
                found.append((weight, count, per_row, row_bytes))
            budget -= count * _PIECE.value
    none = (like, 0, 1, 0)
    near, far = (*found, none, none)[:2]
    arguments = dict(zip(("near", "near_count", "near_per_row", "near_row_bytes"), near, strict=True))
    arguments |= dict(zip(("far", "far_count", "far_per_row", "far_row_bytes"), far, strict=True))
    return Ahead(_programs(like.device) if found else 0, {**arguments, "AHEAD": len(found)})


def _pieces(weight: torch.Tensor, budget: int) -> tuple[int, int, int]:
    """Number of pieces, pieces of each row, bytes a row: the beginning of every row, or else whole first rows."""
    rows, row_bytes = weight.shape[0], weight.shape[1] * weight.element_size()
    if row_bytes % _PIECE.value or not weight.is_contiguous():
        return 0, 1, row_bytes
    whole = row_bytes // _PIECE.value
    per_row = min(budget // (rows * _PIECE.value), whole)
    return (rows * per_row, per_row, row_bytes) if per_row else (budget // row_bytes * whole, whole, row_bytes)


@functools.cache
def _can_prefetch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def fetch_ahead(
    program,
    programs,
    near,
    near_count,
    near_per_row,
    near_row_bytes,
    far,
    far_count,
    far_per_row,
    far_row_bytes,
    AHEAD: tl.constexpr,
):
    """The share of the `program`-th of `programs`."""
    _fetch(program, programs, near, near_count, near_per_row, near_row_bytes)
    if AHEAD > 1:
        _fetch(program, programs, far, far_count, far_per_row, far_row_bytes)


@triton.jit
def _fetch(program, programs, weight, count, per_row, row_bytes):
    base = weight.to(tl.int64)
    for start in range(program * _BLOCK, count, programs * _BLOCK):
        i = start + tl.arange(0, _BLOCK)
        at = base + (i // per_row).to(tl.int64) * row_bytes + (i % per_row) * _PIECE
        tl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0;"
            " @wanted cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [at, (i < count).to(tl.int32), tl.full([_BLOCK], _PIECE, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
