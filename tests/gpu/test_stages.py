"""Pipeline stages on a GPU, where sums, norms and single rows have kernels of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from corogen.attention.base import Options, Pair, dense_attention, forward_context
from corogen.model.shard import Shard
from corogen.model.stages import forward_stage
from corogen.testing.tiny import tiny_model
from tests.model.staged import build_stage

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FAMILIES = ["llama", "qwen3", "gemma2", "phi3", "gpt2", "olmo2", "cohere", "gpt_oss", "qwen3_moe", "opt", "granite"]


class Alone:
    """Context of one sequence from its beginning."""

    def rotate(self, q: Any, k: Any, cos: Any, sin: Any, turn: Callable[[], Pair]) -> Pair:
        """At once."""
        return turn()

    def reject(self, reason: str) -> None:
        """Nothing is refused."""

    def attend(self, module: Any, q: Any, k: Any, v: Any, options: Options) -> torch.Tensor:
        """Every token sees those before it."""
        return dense_attention(q, k, v, options, causal=True).transpose(1, 2)


@torch.inference_mode()
def logits(models: list[Any], count: int) -> torch.Tensor:
    """[tokens, vocabulary] of `count` tokens through all models."""
    places = torch.arange(count, device="cuda")
    out = None
    for model in models:
        with forward_context(Alone()):
            out = forward_stage(model, places + 3, out, places, places)
    assert out is not None
    return out.float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_what_the_whole_gives(family: str, dtype: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    options = {"device": "cuda", "dtype": dtype}
    whole = build_stage(path, Shard(), **options)._model
    parts = [build_stage(path, Shard(pp_rank=i, pp=3), **options)._model for i in range(3)]
    for count in (1, 7):
        wanted, found = logits([whole], count), logits(parts, count)
        assert float((wanted - found).norm() / wanted.norm()) < (1e-4 if dtype == "float32" else 0.1)


def test_every_layer_of_a_stage_has_its_sums_fused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama")
    for i in range(2):
        model = build_stage(path, Shard(pp_rank=i, pp=2), device="cuda", dtype="bfloat16")._model
        kept = [layer for layer in model.model.layers if hasattr(layer, "self_attn")]
        assert [("forward" in vars(layer), "corogen_single" in vars(layer)) for layer in kept] == [(True, True)] * 2
