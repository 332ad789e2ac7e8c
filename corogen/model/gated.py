"""Gated feed-forward blocks in two products and one kernel on a GPU, where ours agrees with the model's."""

from __future__ import annotations

import torch
from torch import nn

from corogen.model.devices import kernels_work
from corogen.model.fuse import FusedProduct, FusedSlice


class GatedFeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up as one product."""

    def __init__(self, product: FusedProduct, down: nn.Module) -> None:
        super().__init__()
        self.down_proj = down
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, T, hidden]; returns the same shape and dtype."""
        from corogen.model.triton_parts import silu_mul

        out: torch.Tensor = self.down_proj(silu_mul(self.product.whole(x)))
        return out


def replace_feed_forwards(model: nn.Module) -> None:
    """Replace every gated block of the model that ours agrees with; others stay as they are."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            ours = _replacement(child)
            if ours is not None:
                setattr(module, name, ours)


def _replacement(block: nn.Module) -> GatedFeedForward | None:
    children = dict(block.named_children())
    gate, up, down = (children.get(n) for n in ("gate_proj", "up_proj", "down_proj"))
    if not isinstance(gate, FusedSlice) or not isinstance(up, FusedSlice) or down is None:
        return None
    if set(children) - {"gate_proj", "up_proj", "down_proj", "act_fn"} or gate.product is not up.product:
        return None
    weight = next(down.parameters(), None)
    if weight is None or not kernels_work(weight.device):
        return None
    ours = GatedFeedForward(gate.product, down)
    return ours if _agree(block, ours, gate.in_features, weight) else None


def _agree(block: nn.Module, ours: GatedFeedForward, size: int, like: torch.Tensor) -> bool:
    """Whether both give the same for random input, up to rounding."""
    x = torch.randn(1, 3, size, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    try:
        wanted = block(x)
    except TypeError:
        return False
    found = ours(x)
    tolerance = 1e-4 if like.dtype == torch.float32 else 3e-2
    scale = float(wanted.abs().max())
    return bool(wanted.dtype == found.dtype and (wanted - found).abs().max() <= tolerance * scale)
