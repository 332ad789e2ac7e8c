"""Sums of the residual stream together with the norm behind them, in decoder layers of the usual shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from corogen.model.norm import RMSNorm
from corogen.model.single import SingleRow

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def fuse_layer_sums(model: Any) -> None:
    """Replace the forward of decoder layers that compute

        x = x + self_attn(input_layernorm(x)); x = x + mlp(post_attention_layernorm(x))

    which is found out with stand-ins for attention and random numbers. Others stay as they are.
    """
    stack = next((m for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList)), None)
    if stack is None:
        return
    following: list[Any] = [*(getattr(layer, "input_layernorm", None) for layer in stack.layers[1:])]
    following.append(getattr(stack, "norm", None))
    for layer, after in zip(stack.layers, following, strict=True):
        if _fits(layer) and _agrees(layer):
            layer.forward = _fused_forward(layer, after if isinstance(after, RMSNorm) and after.adds else None)


def _fits(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    norms = [children.get(name) for name in ("input_layernorm", "post_attention_layernorm")]
    return set(children) == _CHILDREN and all(isinstance(n, RMSNorm) and n.adds for n in norms)


def _fused_forward(layer: Any, after: RMSNorm | None) -> Callable[..., Any]:
    """The layer's forward; `after` is the norm that its result goes to, None for a pipeline stage's last."""
    original = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            return original(hidden_states, *args, **kwargs)
        single: SingleRow | None = layer.__dict__.get("corogen_single")
        if single is not None and single.takes(hidden_states):
            return single(hidden_states, **kwargs)
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        total, normed = layer.post_attention_layernorm.after_sum(attended, hidden_states)
        out = layer.mlp(normed)
        return out + total if after is None else after.sum_for_later(out, total)

    return forward


class _StandIn(nn.Module):
    """In place of attention: something that depends on its input and on the layer's place for it."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states.roll(1, -1) * 0.7, None


def _agrees(layer: Any) -> bool:
    """Whether our forward gives the same as the layer's own, up to rounding."""
    weight = layer.input_layernorm.weight
    like = next(itertools.chain(layer.self_attn.parameters(), layer.mlp.parameters()), weight)
    x = torch.randn(1, 3, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight.device, like.dtype)
    attention = layer.self_attn
    layer.self_attn = _StandIn()
    try:
        wanted, found = layer.forward(x), _fused_forward(layer, None)(x)
    except (TypeError, ValueError, AttributeError):
        return False
    finally:
        layer.self_attn = attention
    if not isinstance(wanted, torch.Tensor) or wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    tolerance = 1e-4 if like.dtype == torch.float32 else 3e-2
    return bool((wanted - found).abs().max() <= tolerance * wanted.abs().max())
