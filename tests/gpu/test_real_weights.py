"""The demo model's real weights in bfloat16, through graphs and kernels."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch

from corogen.config import EngineConfig
from corogen.engine import Engine
from corogen.params import GenerationConfig
from corogen.text.tokenizer import Tokenizer
from corogen.wire.messages import PrefillRow, Sampling, SlotBlocks, SlotInit, StepInput
from tests.model.driver import load
from tests.real import parity

pytestmark = [pytest.mark.gpu, pytest.mark.real_model, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ROWS, CONTEXT, LENGTH = 200, 64, 320


@pytest.fixture(scope="module")
def texts(demo_folder) -> torch.Tensor:
    """[ROWS, LENGTH] ids of this repository's pages and programs, which the model has never seen."""
    pages = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md", *sorted(ROOT.glob("corogen/**/*.py"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = Tokenizer.from_folder(demo_folder).encode(text, add_special_tokens=False)[: ROWS * LENGTH]
    return torch.tensor(ids).view(ROWS, LENGTH)


def our_log_likelihood(runner, texts: torch.Tensor) -> float:
    """Sum over the tokens behind the first CONTEXT of each row: prompts, then decode steps whose tokens are given."""
    steps, given, seen = runner._steps, texts.cuda(), {}
    choose = steps.choose

    def keep(outcome, targets, ends):
        seen["last"] = outcome.logits[: len(targets)].float(), torch.from_numpy(targets).long().cuda()
        return choose(outcome, targets, ends)

    steps.choose = keep
    width = -(-LENGTH // 16)
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for at in range(CONTEXT, LENGTH):
        message = StepInput(at, 0, [], [], list(range(ROWS)), [])
        if at == CONTEXT:
            init = [SlotInit(i, CONTEXT, 0, Sampling()) for i in range(ROWS)]
            blocks = [SlotBlocks(i, list(range(i * width, (i + 1) * width))) for i in range(ROWS)]
            prompts = [PrefillRow(i, 0, texts[i, :CONTEXT].tolist(), True) for i in range(ROWS)]
            message = StepInput(at, 0, init, blocks, [], prompts)
        runner.launch(message).wait()
        logits, slots = seen["last"]
        wanted = given[slots, at]
        total += logits.log_softmax(-1).gather(1, wanted[:, None]).double().sum()
        steps._slots.last_tokens[slots] = wanted.int()
    return float(total)


@torch.inference_mode()
def their_log_likelihood(model, texts: torch.Tensor) -> float:
    total = 0.0
    for rows in texts.cuda().split(20):
        logits = model(input_ids=rows).logits[:, CONTEXT - 1 : -1].float().log_softmax(-1)
        total += float(logits.gather(2, rows[:, CONTEXT:, None]).double().sum())
    return total


def test_perplexity_is_that_of_transformers(demo_folder, texts) -> None:
    from transformers import AutoModelForCausalLM

    count = ROWS * (LENGTH - CONTEXT)
    assert count > 50_000
    runner, ready = load(
        demo_folder, device="cuda", dtype="bfloat16", num_blocks=ROWS * 20, max_slots=ROWS, max_step_tokens=16_384,
        session_len=512,
    )  # fmt: skip
    assert ready.warnings == []
    assert "capture" in ready.phases
    with torch.inference_mode():
        ours = math.exp(-our_log_likelihood(runner, texts) / count)
    theirs = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = (
            AutoModelForCausalLM.from_pretrained(demo_folder, dtype=dtype, attn_implementation="eager").cuda().eval()
        )
        theirs[dtype] = math.exp(-their_log_likelihood(model, texts) / count)
    print(f"perplexity over {count} tokens: ours {ours:.4f}, transformers' {theirs}")
    assert abs(ours / theirs[torch.bfloat16] - 1) < 0.005
    assert abs(ours / theirs[torch.float32] - 1) < 0.005


async def test_two_hundred_chats_make_sense(demo_gguf, demo_folder, tmp_path) -> None:
    """Their answers are likely to the model in fp32, end by themselves or at their bound, and hold no broken text."""
    from transformers import AutoModelForCausalLM

    words = parity._WORDS
    chats = [
        [
            {
                "role": "user",
                "content": f"Write two sentences about a {words[i % 29]} and a {words[(7 * i + i // 29) % 29]}.",
            }
        ]
        for i in range(200)
    ]
    async with Engine(
        str(demo_gguf), EngineConfig(device_type="cuda", dtype="bfloat16", num_gpu_blocks=2000)
    ) as engine:
        prompts = [engine.prepare(chat).prompt_ids for chat in chats]
        config = GenerationConfig(max_new_tokens=96)
        answers = await asyncio.gather(*(engine.generate(p, config) for p in prompts))
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).cuda().eval()
    losses = []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.text.strip()
        assert "\ufffd" not in answer.text
        ids = torch.tensor([[*prompt, *answer.token_ids]], device="cuda")
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        losses.append(-float(logits.gather(1, ids[0, len(prompt) :, None]).mean()))
    print(f"nats a token: mean {sum(losses) / 200:.3f}, highest {max(losses):.3f}")
    for i in (0, 50, 100, 150, 199):
        print(chats[i][0]["content"], "->", answers[i].text[:300].replace("\n", " "))
    assert max(losses) < 2.5  # ids drawn at random would have 11
