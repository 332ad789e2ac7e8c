"""Our forward against transformers' eager attention, family by family."""

from __future__ import annotations

import pytest
import torch

from corogen.testing.tiny import FAMILIES
from tests.model.conftest import ModelMaker
from tests.model.driver import Driver, load
from tests.model.reference import random_prompts, reference, reference_logits


def worst_difference(path, *, chunk: int, lengths: tuple[int, ...], new_tokens: int = 6, **spec) -> float:
    """The largest difference of any logit of the new tokens from transformers."""
    runner, _ = load(path, **spec)
    model = reference(path)
    worst = 0.0
    for s in Driver(runner, chunk).generate(random_prompts(*lengths), new_tokens):
        wanted = reference_logits(model, s.tokens)[s.prompt_len - 1 : -1]
        worst = max(worst, float((torch.stack(s.logits) - wanted).abs().max()))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_give_the_logits_of_transformers(family: str, make_model: ModelMaker) -> None:
    """Four prompts in chunks of 33 tokens, so that prefill rows, cached prefixes and decode rows share steps."""
    assert worst_difference(make_model(family), chunk=33, lengths=(5, 17, 40, 90)) < 2e-4


@pytest.mark.parametrize("bias", [False, True])
def test_biases_survive_fusing(bias: bool, make_model: ModelMaker) -> None:
    path = make_model("llama", attention_bias=bias, mlp_bias=bias)
    assert worst_difference(path, chunk=256, lengths=(9,)) < 2e-4


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_every_grouping_of_heads(kv_heads: int, make_model: ModelMaker) -> None:
    path = make_model("llama", num_key_value_heads=kv_heads)
    assert worst_difference(path, chunk=16, lengths=(5, 40)) < 2e-4


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_every_block_size(block_size: int, make_model: ModelMaker) -> None:
    runner, _ = load(make_model("mistral"), block_size=block_size)
    model = reference(make_model("mistral"))
    (s,) = Driver(runner, chunk=11, block_size=block_size).generate(random_prompts(30), 6)
    assert float((torch.stack(s.logits) - reference_logits(model, s.tokens)[29:-1]).abs().max()) < 2e-4


def test_explicit_bfloat16_is_obeyed_on_a_cpu(make_model: ModelMaker) -> None:
    runner, ready = load(make_model("llama"), dtype="bfloat16")
    assert ready.dtype == "bfloat16"
    (s,) = Driver(runner).generate(random_prompts(20), 3)
    wanted = reference_logits(reference(make_model("llama")), s.tokens)[19:-1]
    assert float((torch.stack(s.logits) - wanted).abs().max()) < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gives_the_logits_of_transformers(family: str, make_model: ModelMaker) -> None:
    path = make_model(family)
    assert worst_difference(path, chunk=33, lengths=(5, 17, 40, 90), device="cuda", dtype="float32") < 1e-3
