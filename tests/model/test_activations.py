"""A row of an activation is bitwise the same alone and among others, whatever the number of threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from corogen.model.activations import RowStable, stabilise_activations


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "sigmoid", "mish"])
def test_a_row_is_the_same_alone_and_together(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    ours = RowStable(ACT2FN[name])
    for width, rows in ((48, 701), (64, 1025), (96, 301), (128, 701), (1536, 17), (1536, 201), (40_000, 3)):
        part_of_a_product = torch.randn(1, rows, 2 * width)[..., :width]
        for x in (part_of_a_product, part_of_a_product.contiguous()):
            alone = torch.cat([ours(x[:, i : i + 1]) for i in range(rows)], 1)
            assert torch.equal(ours(x), alone), (width, rows, x.is_contiguous())


def test_values_are_the_activation_s() -> None:
    x = torch.randn(1, 37, 100)
    torch.testing.assert_close(RowStable(nn.SiLU())(x), nn.functional.silu(x))
    torch.testing.assert_close(RowStable(nn.GELU())(x[0, 0]), nn.functional.gelu(x[0, 0]))


def test_only_what_can_differ_is_wrapped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.ReLU(), nn.Sequential(nn.GELU()))
    stabilise_activations(model)
    kinds = [type(m).__name__ for m in (model[1], model[2], model[3][0])]
    assert kinds == ["RowStable", "ReLU", "RowStable"]
