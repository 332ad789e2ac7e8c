"""Attention over the paged cache on a GPU: one kernel stores, one does the decode rows, one the prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from corogen.attention.base import HeadNorms, Options, Pair
from corogen.attention.cache import TokenMajorCache
from corogen.attention.triton_decode import decode_attention
from corogen.attention.triton_prefill import prefill_attention
from corogen.attention.triton_store import store


class DeviceBatch(NamedTuple):
    """One step as the kernels see it; everything is int32 and on the device. Decode rows come first."""

    #: [slots, width], the block tables
    tables: torch.Tensor
    #: [T], where each token's key and value go, or -1 for nowhere
    places: torch.Tensor
    #: [n, 8], the decode rows' shares, see `share_out`
    shares: torch.Tensor
    #: [n, 4], see `prefill_attention`; None: decode rows only
    tiles: torch.Tensor | None
    tile_tokens: int
    #: [rows * kv_heads], zeros, see `decode_attention`
    arrived: torch.Tensor


class TritonAttention:
    """Context of one step. With `turns` the rotary embedding happens where keys are stored, in the same kernel."""

    def __init__(self, cache: TokenMajorCache, batch: DeviceBatch, turns: bool) -> None:
        self._cache, self._batch, self._turns = cache, batch, turns
        self._pending: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    def reject(self, reason: str) -> None:
        """The probe has refused everything unusual already."""
        raise AssertionError(f"an attention layer {reason}, but did not when the model was loaded")

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable[[], Pair]
    ) -> Pair:
        """Leave q and k as they are for the layer's `attend`, or turn them now."""
        if not self._turns:
            return turn()
        self._pending = (q, k, (cos.to(q.dtype).contiguous(), sin.to(q.dtype).contiguous()))
        return q, k

    def _angles(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._pending is None:
            return None
        wanted_q, wanted_k, angles = self._pending
        self._pending = None
        if q is not wanted_q or k is not wanted_k:
            raise AssertionError("queries changed between the rotary embedding and attention, but not when probed")
        return angles

    def attend(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """q [1, Hq, T, D], k and v [1, Hkv, T, D]; returns [1, T, Hq, Dv]."""
        layer: int = module.corogen_layer  # type: ignore[assignment]
        angles, batch = self._angles(q, k), self._batch
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        norms: HeadNorms | None = module.__dict__.get("corogen_norms")
        store(q, k, v, keys, values, batch.places, angles, norms)
        out = q.new_empty(q.shape[2], q.shape[1], v.shape[3])
        if batch.shares.shape[0]:
            decode_attention(q, keys, values, out, batch.shares, batch.tables, batch.arrived, options)
        if batch.tiles is not None:
            prefill_attention(q, keys, values, out, batch.tiles, batch.tile_tokens, batch.tables, options)
        return out[None]
