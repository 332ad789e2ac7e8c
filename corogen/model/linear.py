"""Linear layers whose weight is stored in the order that oneDNN reads fastest."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear


@functools.cache
def can_pack(dtype: torch.dtype, device_type: str) -> bool:
    """Whether this build and this machine pack weights of `dtype`; found out by trying."""
    mkldnn: Any = torch.backends.mkldnn
    if device_type != "cpu" or not mkldnn.is_available():
        return False
    try:
        layer = PackedLinear(torch.ones(2, 2, dtype=dtype), None)
        return bool((layer(torch.ones(1, 2, dtype=dtype)) == 2).all())
    except (RuntimeError, AttributeError):
        return False


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with a packed weight. A row's result is bitwise the same at every batch size."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # a plain attribute: nothing must move, copy or count a packed tensor
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features]; returns [..., out_features]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class PlainLinear(nn.Module):
    """`F.linear`, for devices and dtypes that can not pack."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features]; returns [..., out_features]."""
        return linear(x, self.weight, self.bias)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear | PlainLinear:
    """The fastest linear layer for this weight; packs a copy, so that the caller can free its own."""
    if can_pack(weight.dtype, weight.device.type):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
