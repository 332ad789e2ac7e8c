"""Steps through CUDA graphs are the steps themselves."""

from __future__ import annotations

import pytest
import torch

from corogen.testing.tiny import tiny_model
from corogen.wire.messages import Sampling
from tests.model.driver import Driver, load
from tests.model.reference import random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FAMILIES = ["llama", "qwen3", "gemma2", "phi3", "gpt2", "olmo2", "cohere"]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_k=30, seed=1),
    Sampling(repetition_penalty=1.2, presence_penalty=0.3, banned_ids=(4, 5)),
    Sampling(suppress_ids=(7,), suppress_until=12),
    Sampling(),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_and_single_launches_give_the_same(family: str, tmp_path) -> None:
    path = tiny_model(tmp_path, family)
    answers, logits = [], []
    for eager in (True, False):
        runner, ready = load(path, device="cuda", dtype="float32", eager_mode=eager)
        assert ready.warnings == []
        assert ("capture" in ready.phases) is not eager
        sequences = Driver(runner, chunk=33).generate(random_prompts(1, 5, 17, 40, 90), 10, SAMPLINGS)
        answers.append([s.new for s in sequences])
        logits.append(torch.stack([t for s in sequences for t in s.logits]))
    assert answers[0] == answers[1]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-4


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_are_captured_in_16_bits(family: str, tmp_path) -> None:
    """In 32 bits torch has no grouped product that never waits, so those are served without graphs."""
    path = tiny_model(tmp_path, family)
    answers = []
    for eager in (True, False):
        runner, ready = load(path, device="cuda", dtype="bfloat16", eager_mode=eager)
        assert ready.warnings == []
        answers.append([s.new for s in Driver(runner, chunk=33).generate(random_prompts(5, 40), 4)])
    assert [len(a) for a in answers[0]] == [len(a) for a in answers[1]] == [4, 4]
    _, ready = load(path, device="cuda", dtype="float32")
    assert "no CUDA graphs" in ready.warnings[0]


def test_a_wide_model_replaces_everything_that_it_can(tmp_path) -> None:
    """Norms, feed-forward blocks and sums of a Llama are single kernels, and q and k are turned as they are stored."""
    runner, _ = load(tiny_model(tmp_path, "llama"), device="cuda", dtype="bfloat16")
    kinds = [type(m).__name__ for m in runner._model.modules()]
    assert kinds.count("GatedFeedForward") == 4
    assert kinds.count("RMSNorm") == 9
    assert all("forward" in vars(layer) for layer in runner._model.model.layers)
    assert runner._steps._turns


def test_a_model_that_can_not_be_captured_is_served_without_graphs(tmp_path) -> None:
    from unittest import mock

    from corogen.workers.device_steps import DeviceSteps

    original = DeviceSteps._decode

    def waits(self, size):
        outcome = original(self, size)
        outcome.ids.cpu()
        return outcome

    with mock.patch.object(DeviceSteps, "_decode", waits):
        runner, ready = load(tiny_model(tmp_path, "llama"), device="cuda", dtype="float32")
    assert "no CUDA graphs" in ready.warnings[0]
    (s,) = Driver(runner).generate(random_prompts(20), 4)
    assert len(s.new) == 4
