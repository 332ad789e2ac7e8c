"""The engine on a GPU: tiny models of several families against transformers, in fp32."""

import asyncio

import pytest

from corogen.config import EngineConfig
from corogen.engine import Engine
from corogen.params import GenerationConfig
from corogen.testing.tiny import tiny_model
from tests.real import parity

DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmo2", "granite"]
FAMILIES = [*DENSE, "gpt_oss", "qwen3_moe"]

#: a worker process takes ten seconds to start
IN_PROCESS = {"distributed_executor_backend": "uni"}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_ids_equal_transformers_on_the_same_gpu(tmp_path, family):
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path, family, with_tokenizer=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").cuda().eval()
    prompts = [[(7 * i + j * j) % 200 + 2 for j in range(length)] for i, length in enumerate((1, 5, 17, 40, 90))]
    config = GenerationConfig(max_new_tokens=24, ignore_eos=True)
    # 14 blocks of 16 for five sequences: some are preempted
    settings = {"device_type": "cuda", "dtype": "float32", "block_size": 16, "num_gpu_blocks": 14, **IN_PROCESS}
    async with Engine(str(folder), EngineConfig(**settings, max_batch_size=4)) as engine:
        together = [a.token_ids for a in await asyncio.gather(*(engine.generate(p, config) for p in prompts))]
        alone = [(await engine.generate(p, config)).token_ids for p in prompts]
        assert engine.ready.device.startswith("cuda")
    theirs = [parity.generate_on(model, p, 24) for p in prompts]
    print(family, parity.near_ties(model, prompts, together, theirs), parity.near_ties(model, prompts, alone, theirs))


@pytest.mark.parametrize("family", [*DENSE, "starcoder2", "cohere"])
async def test_in_16_bits_answers_part_at_near_ties_only(tmp_path, family):
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path, family, with_tokenizer=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    model = model.cuda().eval()
    prompts = [[(7 * i + j * j) % 200 + 2 for j in range(length)] for i, length in enumerate((1, 5, 17, 40, 90))]
    config = GenerationConfig(max_new_tokens=24, ignore_eos=True)
    settings = {"device_type": "cuda", "dtype": "bfloat16", "num_gpu_blocks": 64, **IN_PROCESS}
    async with Engine(str(folder), EngineConfig(**settings, max_batch_size=8)) as engine:
        ours = [a.token_ids for a in await asyncio.gather(*(engine.generate(p, config) for p in prompts))]
    theirs = [parity.generate_on(model, p, 24) for p in prompts]
    with torch.inference_mode():
        largest = max(float(model(torch.tensor([p], device="cuda")).logits.abs().max()) for p in prompts)
    # eight units in the last of a bfloat16's eight places
    print(family, parity.near_ties(model, prompts, ours, theirs, limit=8 * 2**-8 * largest), f"of {largest:.1f}")


async def test_seeded_sampling_does_not_depend_on_the_batch(tmp_path):
    folder = tiny_model(tmp_path, "llama", with_tokenizer=True)
    config = GenerationConfig(
        max_new_tokens=24, do_sample=True, random_seed=42, temperature=0.9, top_p=0.9, ignore_eos=True
    )
    async with Engine(str(folder), EngineConfig(device_type="cuda", dtype="float32", num_gpu_blocks=64)) as engine:
        alone = await engine.generate([1, 2, 3], config)
        other = GenerationConfig(max_new_tokens=24, do_sample=True, ignore_eos=True)
        mixed = await asyncio.gather(engine.generate([9, 8], other), engine.generate([1, 2, 3], config))
        assert mixed[1].token_ids == alone.token_ids
