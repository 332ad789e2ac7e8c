"""Pipeline stages one behind the other against the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from corogen.testing.tiny import FAMILIES
from tests.model.conftest import ModelMaker
from tests.model.driver import Driver
from tests.model.reference import random_prompts, reference, reference_logits
from tests.model.staged import Chain


def worst_difference(path: Path, runner: Any, *, chunk: int, lengths: tuple[int, ...], new_tokens: int) -> float:
    """The largest difference of any logit of the new tokens from transformers."""
    model = reference(path)
    worst = 0.0
    for s in Driver(runner, chunk).generate(random_prompts(*lengths), new_tokens):
        wanted = reference_logits(model, s.tokens)[s.prompt_len - 1 : -1]
        worst = max(worst, float((torch.stack(s.logits) - wanted).abs().max()))
    return worst


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_the_logits_of_transformers(family: str, pp: int, make_model: ModelMaker) -> None:
    """Prompts in chunks, so that prefill rows, cached prefixes and decode rows share steps."""
    path = make_model(family)
    chain = Chain(path, pp)
    assert worst_difference(path, chain, chunk=33, lengths=(5, 40, 90), new_tokens=4) < 2e-4
    assert sum(len(s.layers) for s in chain.stages) == 4
    assert [s.warnings for s in chain.stages] == [[]] * pp
    assert {s.vocab_size for s in chain.stages} == {512}
