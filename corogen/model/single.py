"""A single row through a decoder layer in six kernels: norms, activation and sums happen within the products.

Reading the weights is all that a single row costs, so every further kernel is time in which nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from corogen.attention.base import Options, Pair, forward_context
from corogen.model.fuse import FusedSlice
from corogen.model.gated import GatedFeedForward
from corogen.model.matvec import MatVecLinear
from corogen.model.norm import RMSNorm
from corogen.model.stages import try_tokens


class SingleRow:
    """One layer's `x = x + self_attn(input_layernorm(x)); x = x + mlp(post_attention_layernorm(x))`."""

    def __init__(self, layer: Any, qkv: MatVecLinear, gate_up: MatVecLinear) -> None:
        self._layer, self._qkv, self._gate_up = layer, qkv, gate_up

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x is a single row."""
        return self._qkv.takes(x)

    def __call__(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """x [1, 1, hidden]; returns the same shape. `kwargs` are attention's."""
        layer, down = self._layer, self._layer.mlp.down_proj
        self._qkv.expect(norm=layer.input_layernorm)
        layer.self_attn.o_proj.expect(residual=x)
        total, _ = layer.self_attn(hidden_states=x, **kwargs)
        self._gate_up.expect(norm=layer.post_attention_layernorm)
        down.expect(residual=total)
        out: torch.Tensor = down.single(self._gate_up.single(total, gated=True))
        return out


def use_single_rows(model: Any, device: torch.device) -> None:
    """Let the layers that `fuse_layer_sums` has changed compute single rows this way, if all parts are there and the
    model's results stay what they are up to rounding."""
    layers = [layer for layer in model.modules() if "forward" in vars(layer) and _row_of(layer) is not None]
    if not layers:
        return
    with forward_context(_Alone()):
        wanted = try_tokens(model, 1, device)
    for layer in layers:
        layer.__dict__["corogen_single"] = _row_of(layer)
    with forward_context(_Alone()):
        found = try_tokens(model, 1, device)
    # a part that is missing changes everything; rounding of 16 bits adds up to some percent over many layers
    tolerance = 1e-4 if wanted.dtype == torch.float32 else 0.2
    if not (found - wanted).float().norm() <= tolerance * wanted.float().norm():
        for layer in layers:
            del layer.__dict__["corogen_single"]


def _row_of(layer: Any) -> SingleRow | None:
    attention, block = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    slices = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    if not isinstance(block, GatedFeedForward) or not all(isinstance(s, FusedSlice) for s in slices):
        return None
    products = {s.product for s in slices if isinstance(s, FusedSlice)}
    qkv, gate_up = products.pop().linear, block.product.linear
    others = (block.down_proj, getattr(attention, "o_proj", None))
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if products or not isinstance(qkv, MatVecLinear) or not isinstance(gate_up, MatVecLinear):
        return None
    if not all(isinstance(m, MatVecLinear) for m in others) or not all(isinstance(n, RMSNorm) for n in norms):
        return None
    return SingleRow(layer, qkv, gate_up)


class _Alone:
    """Context of a forward of one token, which sees only itself."""

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable[[], Pair]
    ) -> Pair:
        """At once."""
        return turn()

    def reject(self, reason: str) -> None:
        """The probe refuses everything unusual."""

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """The token's own value."""
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2)
