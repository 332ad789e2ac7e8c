"""Which weights are read next: told to the kernels before a product, which can ask the memory for them early."""

from __future__ import annotations

from typing import Any

from torch import nn

from corogen.model.fuse import FusedSlice
from corogen.model.gated import GatedFeedForward
from corogen.model.matvec import MatVecLinear
from corogen.model.norm import RMSNorm


def announce_products(model: Any) -> None:
    """Note at norms and attention layers of the usual shape which linear layers come after them.

    A wrong note would cost a little time and change no result.
    """
    stack = next((m for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList)), None)
    if stack is None:
        return
    for layer in stack.layers:
        attention, block = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        _note(getattr(layer, "input_layernorm", None), _linear(getattr(attention, "q_proj", None)))
        gate = block.product.linear if isinstance(block, GatedFeedForward) else None
        _note(getattr(layer, "post_attention_layernorm", None), _linear(gate))
        if attention is not None:
            # not through setattr, which would register the layers a second time
            attention.__dict__["corogen_upcoming"] = (*_linear(getattr(attention, "o_proj", None)), *_linear(gate))
    _note(getattr(stack, "norm", None), _linear(model.get_output_embeddings()))


def _linear(module: nn.Module | None) -> tuple[MatVecLinear, ...]:
    found = module.product.linear if isinstance(module, FusedSlice) else module
    return (found,) if isinstance(found, MatVecLinear) else ()


def _note(norm: nn.Module | None, linears: tuple[MatVecLinear, ...]) -> None:
    if isinstance(norm, RMSNorm):
        norm.upcoming = linears
