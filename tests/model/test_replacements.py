"""Parts of a model that are computed in fewer operations: only where ours agrees, and with the same results."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from corogen.attention.base import forward_context
from corogen.attention.probe import Probe
from corogen.model.norm import RMSNorm, replace_norms
from corogen.model.rotary import Rotary
from tests.model.conftest import ModelMaker
from tests.model.driver import Driver, load
from tests.model.reference import random_prompts


class PlainRMSNorm(nn.Module):
    """As model classes write it; `start` is what the stored weight is added to."""

    def __init__(self, size: int, dtype: torch.dtype, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
        self.variance_epsilon, self.start = 1e-5, start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.start + self.weight) * wide.to(x.dtype)


class CubicRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.abs().pow(3).mean(-1, keepdim=True) + 1e-5) * self.weight


def norms_of(model: nn.Module) -> list[bool]:
    """Whether each norm of the model is ours."""
    return [isinstance(m, RMSNorm) for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replaced_norm_gives_the_same(dtype: torch.dtype, start: float) -> None:
    model = nn.Sequential(PlainRMSNorm(48, dtype, start))
    x = (torch.randn(1, 7, 48) * 20).to(dtype)
    wanted = model(x)
    replace_norms(model)
    assert norms_of(model) == [dtype == torch.float32 or start == 0.0]
    torch.testing.assert_close(model(x), wanted, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6)


def test_a_row_of_a_norm_does_not_depend_on_the_others() -> None:
    norm, x = RMSNorm(torch.randn(576), 1e-5), torch.randn(1, 33, 576)
    assert torch.equal(norm(x)[:, 5:6], norm(x[:, 5:6]))


def test_zeros_stay_zeros() -> None:
    assert torch.equal(RMSNorm(torch.ones(8), 1e-6)(torch.zeros(1, 2, 8)), torch.zeros(1, 2, 8))


def test_another_formula_stays_as_it_is() -> None:
    model = nn.Sequential(CubicRMSNorm(48, torch.float32))
    replace_norms(model)
    assert type(model[0]) is CubicRMSNorm


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "mistral", "olmo2", "phi3", "granite"])
def test_the_families_that_most_models_belong_to_are_replaced(family: str, make_model: ModelMaker) -> None:
    model = load_and_run(make_model(family))
    assert all(norms_of(model))
    assert rotary_of(model)._agrees is True


def test_a_rotary_embedding_of_another_kind_is_kept(make_model: ModelMaker) -> None:
    """Cohere turns neighbouring numbers, not the halves of a head."""
    assert rotary_of(load_and_run(make_model("cohere")))._agrees is False


def load_and_run(path) -> nn.Module:
    runner, _ = load(path)
    Driver(runner).generate(random_prompts(5), 2)
    return runner._model


def rotary_of(model: nn.Module) -> Rotary:
    rotary = sys.modules[type(model).__module__].apply_rotary_pos_emb
    assert isinstance(rotary, Rotary)
    return rotary


def turn(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def one(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return one(q), one(k)


def fused_heads(tokens: int, *heads: int, dim: int = 8) -> list[torch.Tensor]:
    """Queries, keys and values as views of one product, [1, heads, tokens, dim] each."""
    parts = torch.randn(1, tokens, sum(heads) * dim).split([n * dim for n in heads], -1)
    return [p.view(1, tokens, -1, dim).transpose(1, 2) for p in parts]


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("fused", [True, False])
def test_queries_and_keys_are_turned_as_by_the_original(fused: bool, tokens: int) -> None:
    q, k, _ = fused_heads(tokens, 4, 2, 2)
    if not fused:
        q, k = q.clone(), k.clone()
    kept = q.clone(), k.clone()
    cos, sin = torch.randn(1, tokens, 8), torch.randn(1, tokens, 8)
    rotary = Rotary(turn)
    with forward_context(Probe()):
        for _ in range(2):
            for found, wanted in zip(rotary(q, k, cos, sin), turn(q, k, cos, sin), strict=True):
                torch.testing.assert_close(found, wanted)
            sin = sin * 2  # the next forward has other angles
    assert rotary._agrees
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])


def test_calls_from_elsewhere_reach_the_original() -> None:
    q, k, _ = fused_heads(3, 2, 2, 2)
    cos = sin = torch.randn(1, 3, 8)
    marker = (q, k)
    rotary = Rotary(lambda *args, **kwargs: marker)
    assert rotary(q, k, cos, sin) is marker
    assert rotary(q, k, cos, sin, unsqueeze_dim=2) is marker
