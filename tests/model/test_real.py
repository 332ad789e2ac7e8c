"""The demo model's real weights: chats answered as transformers answers them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from corogen.wire.messages import Sampling
from tests.model.driver import Driver, load
from tests.model.reference import reference, reference_logits

QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about the sea, and one about 1,024 grey pebbles.",
    "Naïve café 👍: how many letters has that word?",
)
#: in fp32 a chosen token may be this far behind the best
NEAR_TIE = 5e-4
#: the model's end token
END = 2


@pytest.mark.real_model
def test_every_greedy_token_of_three_chats_is_the_best_of_transformers(demo: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    prompts = [tokenizer.encode(chat).ids for chat in chats]
    model, runner = reference(demo), load(demo)[0]
    settings = [Sampling(suppress_ids=(END,), suppress_until=len(p) + 16) for p in prompts]
    for s in Driver(runner, chunk=20).generate(prompts, 16, settings):
        logits = reference_logits(model, s.tokens)[s.prompt_len - 1 : -1]
        logits[:, END] = float("-inf")
        behind = logits.amax(-1) - logits[torch.arange(16), torch.tensor(s.new)]
        assert float(behind.max()) < NEAR_TIE
