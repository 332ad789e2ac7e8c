"""Attention over the paged cache with plain torch operations; works on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from corogen.attention.base import Options, Pair, dense_attention
from corogen.attention.cache import KVCache
from corogen.attention.plan import DecodeGroup, PrefillSpan, StepPlan


class PagedAttention:
    """Context of one step: writes this step's keys and values into the cache, then attends over it."""

    def __init__(self, cache: KVCache, plan: StepPlan) -> None:
        self._cache, self._plan = cache, plan

    def reject(self, reason: str) -> None:
        """The probe has refused everything unusual already."""
        raise AssertionError(f"an attention layer {reason}, but did not when the model was loaded")

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable[[], Pair]
    ) -> Pair:
        """At once."""
        return turn()

    def attend(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """q [1, Hq, T, D], k and v [1, Hkv, T, D]; returns [1, T, Hq, Dv]."""
        layer: int = module.corogen_layer  # type: ignore[assignment]
        self._cache.write(layer, self._plan.write, k, v)
        window = self._plan.windows[options.window]
        parts = [(g.rows, self._decode(layer, q, g, options)) for g in window.decode]
        parts += [(s.tokens, self._prefill(layer, q, k, v, s, options)) for s in window.prefill]
        if len(parts) == 1:
            return parts[0][1][None]
        out = q.new_empty(self._plan.num_tokens, q.shape[1], v.shape[3])
        for place, part in parts:
            out[place] = part
        return out[None]

    def _decode(self, layer: int, q: torch.Tensor, group: DecodeGroup, options: Options) -> torch.Tensor:
        """[rows of the group, Hq, Dv]."""
        k, v = self._cache.gather(layer, group.blocks, group.size)
        rows = q[0, :, group.rows]
        if q.device.type == "cpu" and q.dtype == torch.float32 and options.softcap is None and options.sinks is None:
            return _by_kv_head(rows, k, v, options, group.mask)
        rows, k, v = rows.transpose(0, 1)[:, :, None], k.transpose(0, 1), v.transpose(0, 1)
        return dense_attention(rows, k, v, options, mask=group.mask)[:, :, 0]

    def _prefill(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: PrefillSpan, options: Options
    ) -> torch.Tensor:
        """[tokens of the span, Hq, Dv]."""
        if span.blocks is None:
            k, v = k[:, :, span.tokens], v[:, :, span.tokens]
        else:
            k, v = (t.transpose(0, 1)[:, :, : span.num_keys] for t in self._cache.gather(layer, span.blocks, 1))
        rows = q[:, :, span.tokens]
        out = dense_attention(rows, k, v, options, mask=span.mask, causal=span.mask is None)
        return out[0].transpose(0, 1)


def _by_kv_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, mask: torch.Tensor
) -> torch.Tensor:
    """One token a sequence on a CPU: q [Hq, B, D] over k, v [Hkv, B, L, D]; returns [B, Hq, Dv].

    The query heads of one kv head are the rows of one small product. Each product is computed for itself, so a row's
    result does not depend on its batch mates; and two batched products cost half of what torch's fused attention
    costs with so few rows.
    """
    kv_heads, batch, length, dim = k.shape
    group = q.shape[0] // kv_heads
    rows = q.reshape(kv_heads, group, batch, dim).transpose(1, 2).reshape(kv_heads * batch, group, dim)
    hidden = mask.view(1, batch, 1, length).expand(kv_heads, -1, -1, -1).reshape(-1, 1, length)
    k, v = k.view(kv_heads * batch, length, dim), v.view(kv_heads * batch, length, -1)
    weights = torch.baddbmm(hidden, rows, k.transpose(1, 2), alpha=options.scaling).softmax(-1)
    out = torch.bmm(weights, v).view(kv_heads, batch, group, -1)
    return out.transpose(0, 1).reshape(batch, kv_heads * group, -1)
