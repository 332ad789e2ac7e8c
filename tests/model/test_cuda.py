"""What only a GPU can show."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from corogen.wire.messages import Sampling, StepInput
from corogen.workers.pending import PendingTokens
from tests.model.conftest import ModelMaker
from tests.model.driver import Driver, load
from tests.model.reference import random_prompts

pytestmark = pytest.mark.gpu

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_k=30, seed=1),
    Sampling(temperature=1.1, top_p=0.9, min_p=0.02, seed=2),
    Sampling(repetition_penalty=1.2, presence_penalty=0.3, banned_ids=(4, 5), suppress_ids=(1,), suppress_until=40),
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_launch_never_waits_for_the_gpu(dtype: str, make_model: ModelMaker) -> None:
    runner, ready = load(make_model("llama"), device="cuda", dtype=dtype)
    assert ready.dtype == dtype
    launch = runner.launch

    def strict(step: StepInput) -> PendingTokens:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(runner, "launch", strict), mock.patch.object(Driver, "_launch", plain_launch):
        sequences = Driver(runner, chunk=16).generate(random_prompts(5, 20, 33, 40), 8, SAMPLINGS)
    assert all(len(s.new) == 8 for s in sequences)


def plain_launch(driver: Driver, message: StepInput, receivers: list) -> None:
    """The driver's own also copies logits, which waits."""
    for s, token in zip(receivers, driver.runner.launch(message).wait(), strict=True):
        s.tokens.append(token)


def test_the_same_tokens_as_on_a_cpu(make_model: ModelMaker) -> None:
    answers = []
    for device in ("cpu", "cuda"):
        runner, _ = load(make_model("qwen3"), device=device, dtype="float32")
        answers.append([s.new for s in Driver(runner).generate(random_prompts(5, 20, 33, 40), 12, SAMPLINGS)])
    assert answers[0] == answers[1]


def test_the_cache_takes_its_share_of_the_free_memory(make_model: ModelMaker) -> None:
    free = torch.cuda.mem_get_info()[0]
    _, ready = load(make_model("llama"), device="cuda", dtype="float32", num_blocks=None, cache_fraction=0.01)
    block = 4 * 2 * (8 + 8) * 16 * 4
    assert 0.008 < ready.num_blocks * block / free < 0.011
