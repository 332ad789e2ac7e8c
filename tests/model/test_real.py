"""The demo model's real weights: chats answered as transformers answers them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from corogen.model.gguf import convert, converted_folder
from corogen.wire.messages import Sampling
from tests.model.driver import Driver, load
from tests.model.reference import reference

QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about the sea, and one about 1,024 grey pebbles.",
    "Naïve café 👍: how many letters has that word?",
)
#: fp32 answers may part only where the two best logits are closer than this
NEAR_TIE = 5e-4
#: the model's end token
END = 2


@pytest.fixture(scope="module")
def demo() -> Path:
    from corogen.model.source import resolve_model

    file = resolve_model("demo")
    folder = converted_folder(file)
    if not folder.is_dir():
        convert(file, folder)
    return folder


@pytest.mark.real_model
def test_three_chats_equal_transformers(demo: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    prompts = [tokenizer.encode(chat).ids for chat in chats]
    model, runner = reference(demo), load(demo)[0]
    settings = [Sampling(suppress_ids=(END,), suppress_until=len(p) + 24) for p in prompts]
    for s in Driver(runner, chunk=20).generate(prompts, 24, settings):
        out = model.generate(
            torch.tensor([s.tokens[: s.prompt_len]]),
            attention_mask=torch.ones(1, s.prompt_len, dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
        )
        wanted = out[0, s.prompt_len :].tolist()
        parted = next((i for i, (a, b) in enumerate(zip(s.new, wanted, strict=True)) if a != b), None)
        if parted is not None:
            best = s.logits[parted].topk(2).values
            assert float(best[0] - best[1]) < NEAR_TIE
