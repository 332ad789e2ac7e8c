"""Rotary position embedding in three operations for queries and keys together, instead of ten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from corogen.attention.base import Pair, active


class Rotary:
    """Stands where a model's module has its `apply_rotary_pos_emb`.

    Calls from outside of our forward, of other shapes, or of a model whose function computes something else (found
    out with random numbers at the first call) go to the original.
    """

    def __init__(self, original: Callable[..., Pair]) -> None:
        self.original = original
        self._agrees: bool | None = None
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """q [1, Hq, T, D], k [1, Hkv, T, D], cos and sin [1, T, D]; returns q and k turned by their positions."""
        plain = not args and not kwargs and cos.ndim == 3 and q.ndim == 4 and cos.shape[-1] == q.shape[-1]
        context = active()
        if not plain or context is None:
            return self.original(q, k, cos, sin, *args, **kwargs)
        if self._agrees is None:
            self._agrees = self._agree(q, k, cos)
        if not self._agrees:
            return self.original(q, k, cos, sin)
        return context.rotate(q, k, cos, sin, lambda: self._apply(q, k, *self._tables(cos, sin)))

    def _agree(self, *like: torch.Tensor) -> bool:
        q, k, cos = (_random_like(t, seed) for seed, t in enumerate(like))
        sin = _random_like(cos, 3)
        wanted = self.original(q, k, cos, sin)
        found = self._apply(q, k, *_tables(cos, sin))
        tolerance = 1e-5 if q.dtype == torch.float32 else 5e-2
        return all(
            a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance)
            for a, b in zip(wanted, found, strict=True)
        )

    def _tables(self, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        """The same for every layer of a forward, which all get the very same tensors."""
        if self._last is None or self._last[0] is not cos or self._last[1] is not sin:
            self._last = (cos, sin, *_tables(cos, sin))
        return self._last[2], self._last[3]

    def _apply(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        heads = q.shape[1]
        if not _adjacent(q, k):
            return _turned(q, cos, sin), _turned(k, cos, sin)
        both = q.as_strided((1, heads + k.shape[1], *q.shape[2:]), q.stride())
        out = _turned(both, cos, sin)
        return out[:, :heads], out[:, heads:]


def _random_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)


def _tables(cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """[1, 1, T, D] each; the sine has the sign of rotate_half in its first half."""
    sin = sin.clone()
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos[:, None], sin[:, None]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), -1).mul_(sin).addcmul_(x, cos)


def _adjacent(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether k's heads follow q's in memory, as in the output of one fused product."""
    return (
        q.stride()[1:] == k.stride()[1:]
        and q.dtype == k.dtype
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and q.storage_offset() + q.shape[1] * q.stride(1) == k.storage_offset()
    )
