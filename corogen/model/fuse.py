"""Fewer and faster matrix products without touching model code: sibling linears share one weight, all are packed.

`q_proj`, `k_proj` and `v_proj` become light modules around one fused layer: the first that is called with an input
computes all three and keeps the others' parts; the last one taken clears them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from corogen.model.devices import kernels_work
from corogen.model.linear import PackedLinear, PlainLinear, can_pack, make_linear
from corogen.model.matvec import MatVecLinear

Linear = PackedLinear | PlainLinear | MatVecLinear

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedProduct:
    """One product whose output is shared out to several modules. No module itself, so that nothing walks into it."""

    def __init__(self, linear: Linear, sizes: list[int]) -> None:
        self.linear, self._sizes = linear, sizes
        self._source: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Part `index` of the product with x; computed when x is new or the part was taken before."""
        if self._source is not x or index not in self._parts:
            self._source = x
            self._parts = dict(enumerate(self.linear(x).split(self._sizes, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._source = None
        return part

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """All parts side by side."""
        out: torch.Tensor = self.linear(x)
        return out


class FusedSlice(nn.Module):
    """Stands where one of the fused layers stood."""

    def __init__(self, product: FusedProduct, index: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.product, self._index = product, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features]; returns [..., out_features], a view of the fused product."""
        return self.product.take(self._index, x)


def fuse_and_pack(model: nn.Module) -> None:
    """Replace sibling linears by fused ones and, where it is possible, every linear by a packed one.

    Unpacked weights are freed layer by layer. Results are those of the separate layers up to rounding.
    """
    for module in list(model.modules()):
        for names in _SIBLINGS:
            _fuse(module, names)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            packed = _packed(child)
            if packed is not None:
                setattr(module, name, packed)


def _fuse(parent: nn.Module, names: tuple[str, ...]) -> None:
    layers = [layer for n in names if type(layer := getattr(parent, n, None)) is nn.Linear]
    if len(layers) != len(names) or len({(m.in_features, m.bias is None, m.weight.dtype) for m in layers}) != 1:
        return
    weight = torch.cat([m.weight for m in layers])
    bias = None if layers[0].bias is None else torch.cat([m.bias for m in layers])
    sizes = [m.out_features for m in layers]
    product = FusedProduct(
        MatVecLinear(weight, bias) if kernels_work(weight.device) else make_linear(weight, bias), sizes
    )
    for index, name in enumerate(names):
        setattr(parent, name, FusedSlice(product, index, layers[0].in_features, sizes[index]))


def _packed(layer: nn.Module) -> nn.Module | None:
    weight = getattr(layer, "weight", None)
    if type(layer) is nn.Linear and kernels_work(layer.weight.device):
        return MatVecLinear(layer.weight, layer.bias)
    if not isinstance(weight, torch.Tensor) or not can_pack(weight.dtype, weight.device.type):
        return None
    if type(layer) is nn.Linear:
        return PackedLinear(weight, layer.bias)
    if type(layer).__name__ == "Conv1D":  # GPT-2's linear, with its weight stored the other way round
        return PackedLinear(weight.t(), layer.bias)  # type: ignore[arg-type]
    return None


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Named layers that compute matrix products, for reports and tests."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Linear | FusedSlice):
            yield name, module
