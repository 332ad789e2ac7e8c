"""The demo model gives transformers' greedy ids: alone, together, in any order, with scarce blocks."""

import asyncio
import random

import pytest

from corogen.config import EngineConfig
from corogen.engine import Engine
from corogen.params import GenerationConfig
from tests.real import parity

pytestmark = pytest.mark.real_model


async def check_parity(model, reference, *, count, new, longest, device="cpu"):
    chats = parity.chats(count, longest=longest)
    config = GenerationConfig(max_new_tokens=new)
    common = {"device_type": device, "dtype": "float32", "max_batch_size": 32, "block_size": 16}
    async with Engine(str(model), EngineConfig(**common, num_gpu_blocks=2000)) as engine:
        prompts = [engine.prepare(c, do_preprocess=not isinstance(c, str)).prompt_ids for c in chats]
        theirs = [parity.generate(reference, prompt, new) for prompt in prompts]
        alone = [(await engine.generate(prompt, config)).token_ids for prompt in prompts]
    async with Engine(str(model), EngineConfig(**common, num_gpu_blocks=2000)) as engine:
        together = [a.token_ids for a in await asyncio.gather(*(engine.generate(p, config) for p in prompts))]
        order = random.Random(3).sample(range(count), count)
        shuffled = await asyncio.gather(*(engine.generate(prompts[i], config) for i in order))
        anew = [a.token_ids for _, a in sorted(zip(order, shuffled, strict=True), key=lambda pair: pair[0])]
        assert engine.stats().cached_tokens > 0
    blocks = -(-(max(map(len, prompts)) + new) // 16) + 2
    async with Engine(str(model), EngineConfig(**common, num_gpu_blocks=blocks)) as engine:
        scarce = [a.token_ids for a in await asyncio.gather(*(engine.generate(p, config) for p in prompts))]
        assert engine.stats().preemptions >= 1
    runs = {"alone": alone, "together": together, "shuffled": anew, "scarce": scarce}
    ties = {name: parity.near_ties(reference, prompts, ours, theirs) for name, ours in runs.items()}
    print(f"prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens; near ties: {ties}")


@pytest.mark.timeout(240)
async def test_a_sample_of_chats_gives_transformers_ids(demo_gguf, reference):
    await check_parity(demo_gguf, reference, count=5, new=12, longest=250)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_twenty_chats_give_transformers_ids(demo_gguf, reference):
    await check_parity(demo_gguf, reference, count=20, new=32, longest=700)


@pytest.mark.gpu
@pytest.mark.timeout(900)
async def test_twenty_chats_give_transformers_ids_on_a_gpu(demo_gguf, reference):
    await check_parity(demo_gguf, reference.to("cuda"), count=20, new=32, longest=700, device="cuda")


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_requests_share_sixteen_slots(demo_gguf):
    config = GenerationConfig(max_new_tokens=16, ignore_eos=True)
    async with Engine(str(demo_gguf), EngineConfig(device_type="cpu", max_batch_size=16)) as engine:
        prompts = [f"What is {i} plus {i}?" for i in range(200)]
        answers = await asyncio.gather(*(engine.generate(p, config) for p in prompts))
        assert all(a.generate_token_len == 16 for a in answers)
        log = engine.step_log(4096)
        assert max(record.running for record in log) == 16
        assert any(record.prefill_rows and record.decode_rows for record in log)
