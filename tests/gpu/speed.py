"""Tokens a second on a GPU with random weights in the shape of well-known models; needs no download.

    python -m tests.gpu.speed llama-1b 1x512 8x512 64x512 256x512 s256x256 mixed

`NxM` are N requests at once of M new tokens each, `sNxM` the same with temperature 0.8 and top_p 0.95, `mixed` 1,024
requests of 100 to 1,024 new tokens, 256 at a time. Prompts are 100 to 1,024 random ids. Everything goes through
`async_stream_infer`, one consumer a request, with a stop string to look for and the prefix cache on.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from corogen import EngineConfig, GenerationConfig, Pipeline, pipeline
from corogen.testing.tiny import tiny_tokenizer

_COMMON: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}


def make(folder: Path, shape: dict[str, Any], device: str) -> Path:
    """Random weights, and a tokenizer with a word for every id."""
    import torch
    import transformers

    fields = {**_COMMON, **shape}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    words = stored["model"]["vocab"]
    known = {*words.values(), *(t["id"] for t in stored["added_tokens"])}
    words.update({f"\u0120x{i}": i for i in range(config.vocab_size) if i not in known})
    path.write_text(json.dumps(stored))
    return folder


def requests(count: int, new_tokens: int | None, seed: int, vocab: int = 49_000) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) each."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = [rng.randint(10, vocab) for _ in range(rng.randint(100, 1024))]
        found.append((prompt, rng.randint(100, 1024)))
    return [(prompt, new_tokens or wanted) for prompt, wanted in found]


async def one(pipe: Pipeline, prompt: list[int], new_tokens: int, **settings: Any) -> int:
    """Stream one answer; returns the number of pieces it came in."""
    config = GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, stop_words=["\u2603 never"], **settings)
    received = pieces = 0
    async for piece in pipe.async_stream_infer(prompt, config):
        received += len(piece.token_ids)
        pieces += 1
    if received != new_tokens:
        raise RuntimeError(f"{received} tokens instead of {new_tokens}")
    return pieces


async def measure(pipe: Pipeline, work: str, seed: int) -> dict[str, Any]:
    """One line of figures."""
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.95} if work.startswith("s") else {}
    count, new = (1024, 0) if work == "mixed" else map(int, work.removeprefix("s").split("x"))
    asked = requests(count, new, seed)
    room = asyncio.Semaphore(256)

    async def limited(prompt: list[int], new_tokens: int) -> int:
        async with room:
            return await one(pipe, prompt, new_tokens, **settings)

    steps, began = pipe.stats().steps, time.perf_counter()
    pieces = sum(await asyncio.gather(*(limited(*r) for r in asked)))
    seconds = time.perf_counter() - began
    log = pipe.step_log(4096)[steps - pipe.stats().steps :]
    decode = sorted(r.duration_s for r in log if not r.prefill_rows)
    tokens = sum(n for _, n in asked)
    return {
        "work": work,
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_a_piece": round(tokens / pieces, 2),
        "decode_step_ms": round(decode[len(decode) // 2] * 1e3, 2) if decode else None,
        "prompt_steps_s": round(sum(r.duration_s for r in log if r.prefill_rows), 2),
    }


def run(shape: dict[str, Any], works: list[str], device: str = "cuda", slots: int = 256) -> None:
    """Print one line for each work."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            device_type=device,
            dtype="bfloat16",
            session_len=2048,
            max_batch_size=slots,
            cache_max_entry_count=0.5,
        )
        with pipeline(str(make(Path(folder), shape, device)), config) as pipe:
            print(pipe.engine.describe(), flush=True)
            asyncio.run(measure(pipe, "2x16", 0))
            for seed, work in enumerate(works, 1):
                print(json.dumps(asyncio.run(measure(pipe, work, seed))), flush=True)


if __name__ == "__main__":
    run(SHAPES[sys.argv[1]], sys.argv[2:])
