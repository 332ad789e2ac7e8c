"""Tokens a second on a GPU with random weights in the shape of well-known models; needs no download.

    python -m tests.gpu.speed llama-1b 1x512 8x512 64x512 256x512 s256x256 mixed [--repeat 3] [--budget 2048]

`NxM` are N requests at once of M new tokens each, `sNxM` the same with temperature 0.8 and top_p 0.95, `mixed` 1,024
requests of 100 to 1,024 new tokens, 256 at a time. Prompts are 100 to 1,024 random ids. Everything goes through
`async_stream_infer`, one consumer a request, with a stop string to look for and the prefix cache on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from corogen import EngineConfig, GenerationConfig, Pipeline, pipeline
from corogen.adapters.bench.figures import Timeline, percentile
from corogen.adapters.bench.random_model import make_folder
from corogen.adapters.bench.shaped import STOP_WORD
from corogen.adapters.bench.workload import read_stream


def requests(count: int, new_tokens: int | None, seed: int, vocab: int = 49_000) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) each."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = [rng.randint(10, vocab) for _ in range(rng.randint(100, 1024))]
        found.append((prompt, rng.randint(100, 1024)))
    return [(prompt, new_tokens or wanted) for prompt, wanted in found]


async def one(pipe: Pipeline, prompt: list[int], new_tokens: int, **settings: Any) -> Timeline:
    """Stream one answer."""
    config = GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, stop_words=[STOP_WORD], **settings)
    line, ids = await read_stream(pipe, prompt, config)
    if len(ids) != new_tokens:
        raise RuntimeError(f"{len(ids)} tokens instead of {new_tokens}")
    return line


async def measure(pipe: Pipeline, work: str, seed: int) -> dict[str, Any]:
    """One line of figures."""
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.95} if work.startswith("s") else {}
    count, new = (1024, 0) if work == "mixed" else map(int, work.removeprefix("s").split("x"))
    asked = requests(count, new, seed)
    room = asyncio.Semaphore(256)

    async def limited(prompt: list[int], new_tokens: int) -> Timeline:
        async with room:
            return await one(pipe, prompt, new_tokens, **settings)

    steps, began = pipe.stats().steps, time.perf_counter()
    lines = await asyncio.gather(*(limited(*r) for r in asked))
    seconds = time.perf_counter() - began
    log = pipe.step_log(4096)[steps - pipe.stats().steps :]
    decode = [r.duration_s for r in log if not r.prefill_rows]
    gaps = [gap for line in lines for gap in line.gaps]
    return {
        "work": work,
        "tokens_per_s": round(sum(n for _, n in asked) / seconds, 1),
        "tokens_a_piece": statistics.median(n for line in lines for n in line.tokens),
        "ttft_ms": round(1e3 * statistics.median(line.first for line in lines), 1),
        "itl_ms": [round(1e3 * percentile(gaps, p), 2) for p in (50, 99)],
        "decode_step_ms": round(1e3 * percentile(decode, 50), 3),
        "prompt_steps_s": round(sum(r.duration_s for r in log if r.prefill_rows), 3),
        "decode_steps_s": round(sum(decode), 3),
        "seconds": round(seconds, 3),
    }


def settings(budget: int | None) -> EngineConfig:
    """What every run has; nothing is switched off."""
    config = EngineConfig(
        device_type="cuda",
        session_len=2048,
        max_batch_size=256,
        cache_max_entry_count=0.7,
        max_prefill_token_num=budget,
        random_weights=True,
    )
    assert config.enable_prefix_caching
    return config


def main() -> None:
    """Print one line for each work and round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("works", nargs="+")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--budget", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with pipeline(str(make_folder(args.shape, Path(folder))), settings(args.budget)) as pipe:
            print(f"{pipe.engine.describe()}; started in {time.perf_counter() - began:.1f} s", flush=True)
            asyncio.run(measure(pipe, "2x16", 0))
            for work in args.works:
                for seed in range(1, args.repeat + 1):
                    print(json.dumps(asyncio.run(measure(pipe, work, seed))), flush=True)


if __name__ == "__main__":
    main()
