"""Linear layers of 16-bit or wider weights on a GPU: one row is a matrix-vector product of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear

if TYPE_CHECKING:
    from corogen.model.norm import RMSNorm
    from corogen.model.triton_parts import Norm


class MatVecLinear(nn.Module):
    """`F.linear`, except for a single row, which is bound by reading the weight: there a kernel made for that reads it
    faster than a library's matrix product does."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # the same parameter, which others may be tied to
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._before: Norm | None = None
        self._behind: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features]; returns [..., out_features]."""
        if not self.takes(x):
            return linear(x, self.weight, self.bias)
        return self.single(x)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x is a single row for our kernel."""
        return x.numel() == self.in_features and x.dtype == self.weight.dtype

    def single(self, x: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        """For a single row; with `gated` silu(a) * b for the halves a, b of the product."""
        from corogen.model.triton_parts import matrix_vector

        norm, residual, self._before, self._behind = self._before, self._behind, None, None
        return matrix_vector(x, self.weight, self.bias, norm=norm, gated=gated, residual=residual)

    def expect(self, *, norm: RMSNorm | None = None, residual: torch.Tensor | None = None) -> None:
        """The next call, which must be one with a single row, normalises before the product and adds behind it."""
        from corogen.model.triton_parts import Norm

        self._before = None if norm is None else Norm(norm.weight, norm.eps, norm.early)
        self._behind = residual
