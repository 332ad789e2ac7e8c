"""A first, tiny forward that finds out which attention layers a model has and what they ask for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from corogen.attention.base import Options, dense_attention
from corogen.errors import UnsupportedModel


class LayerFacts(NamedTuple):
    """One attention layer, in the order of the forward."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


class Probe:
    """Context of the first forward: numbers the attention layers and records their shapes.

    Afterwards every attention module carries its number as `corogen_layer`.
    """

    def __init__(self) -> None:
        self.layers: list[LayerFacts] = []

    def attend(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Causal attention over the probe's own tokens."""
        if hasattr(module, "corogen_layer"):
            self.reject("runs twice in one forward")
        if q.shape[1] % k.shape[1]:
            self.reject(f"has {q.shape[1]} query heads for {k.shape[1]} key heads")
        object.__setattr__(module, "corogen_layer", len(self.layers))
        self.layers.append(LayerFacts(k.shape[1], k.shape[3], v.shape[3], options.window))
        return dense_attention(q, k, v, options, causal=True).transpose(1, 2)

    def reject(self, reason: str) -> None:
        """Raise UnsupportedModel for the layer that is being probed."""
        raise UnsupportedModel(f"attention layer {len(self.layers)} of this model {reason}, which is not supported")
