"""Attention over the paged cache with plain torch operations; works on every device."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from corogen.attention.base import Options, dense_attention
from corogen.attention.cache import KVCache
from corogen.attention.plan import DecodeGroup, PrefillSpan, StepPlan

#: torch gives each thread a scratch buffer of `rows * (keys + 2 + D)` numbers. Only when that is a multiple of a vector
#: register are all buffers aligned alike, and only then does a result not depend on the thread that computes it.
_ROWS = 4 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 8


class PagedAttention:
    """Context of one step: writes this step's keys and values into the cache, then attends over it."""

    def __init__(self, cache: KVCache, plan: StepPlan) -> None:
        self._cache, self._plan = cache, plan

    def reject(self, reason: str) -> None:
        """The probe has refused everything unusual already."""
        raise AssertionError(f"an attention layer {reason}, but did not when the model was loaded")

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
        rows = q[0, :, group.rows].transpose(0, 1)
        if q.device.type == "cpu" and options.softcap is None and options.sinks is None:
            return _by_kv_head(rows, k, v, options, group.mask)
        return dense_attention(rows[:, :, None], k, v, options, mask=group.mask)[:, :, 0]

    def _prefill(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: PrefillSpan, options: Options
    ) -> torch.Tensor:
        """[tokens of the span, Hq, Dv]."""
        if span.blocks is None:
            k, v = k[:, :, span.tokens], v[:, :, span.tokens]
        else:
            k, v = (t[:, :, : span.num_keys] for t in self._cache.gather(layer, span.blocks, 1))
        rows = q[:, :, span.tokens]
        out = dense_attention(rows, k, v, options, mask=span.mask, causal=span.mask is None)
        return out[0].transpose(0, 1)


def _by_kv_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, mask: torch.Tensor
) -> torch.Tensor:
    """One token a sequence on a CPU: q [B, Hq, D] over k, v [B, Hkv, L, D]; returns [B, Hq, Dv].

    The query heads of one kv head stand as rows of one product, filled up to a multiple of `_ROWS`.
    """
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = q.reshape(batch, kv_heads, group, dim)
    if group % _ROWS:
        rows = pad(rows, (0, 0, 0, -group % _ROWS))
    out = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=options.scaling)
    return out[:, :, :group].reshape(batch, heads, v.shape[3])
