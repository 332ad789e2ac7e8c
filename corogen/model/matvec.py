"""Linear layers of 16-bit or wider weights on a GPU: one row is a matrix-vector product of our own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear


class MatVecLinear(nn.Module):
    """`F.linear`, except for a single row, which is bound by reading the weight: there a kernel made for that reads it
    faster than a library's matrix product does."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # the same parameter, which others may be tied to
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features]; returns [..., out_features]."""
        if x.numel() != self.in_features or x.dtype != self.weight.dtype:
            return linear(x, self.weight, self.bias)
        from corogen.model.triton_parts import matrix_vector

        return matrix_vector(x, self.weight, self.bias)
