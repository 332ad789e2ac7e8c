"""A first, tiny forward that finds out which attention layers a model has and what they ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from corogen.attention.base import Options, Pair, dense_attention
from corogen.errors import UnsupportedModel


class LayerFacts(NamedTuple):
    """One attention layer, in the order of the forward."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    #: query heads a key head
    group: int = 1
    #: queries and keys reach attention as the rotary embedding leaves them; True too for a layer without one
    turned_last: bool = True


class Probe:
    """Context of the first forward: numbers the attention layers and records their shapes.

    Afterwards every attention module carries its number as `corogen_layer`.
    """

    def __init__(self) -> None:
        self.layers: list[LayerFacts] = []
        self._turned: Pair | None = None
        self._even = True

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable[[], Pair]
    ) -> Pair:
        """At once, and remember what came out."""
        self._turned = turn()
        self._even &= cos.dtype == q.dtype and q.shape[-1] % 2 == 0
        return self._turned

    def attend(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Causal attention over the probe's own tokens."""
        if hasattr(module, "corogen_layer"):
            self.reject("runs twice in one forward")
        if q.shape[1] % k.shape[1]:
            self.reject(f"has {q.shape[1]} query heads for {k.shape[1]} key heads")
        object.__setattr__(module, "corogen_layer", len(self.layers))
        turned, self._turned = self._turned, None
        last = self._even and (turned is None or (turned[0] is q and turned[1] is k))
        self.layers.append(
            LayerFacts(k.shape[1], k.shape[3], v.shape[3], options.window, q.shape[1] // k.shape[1], last)
        )
        return dense_attention(q, k, v, options, causal=True).transpose(1, 2)

    def reject(self, reason: str) -> None:
        """Raise UnsupportedModel for the layer that is being probed."""
        raise UnsupportedModel(f"attention layer {len(self.layers)} of this model {reason}, which is not supported")
