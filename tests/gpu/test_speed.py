"""What a GPU's steps must not do, whatever their speed."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest
import torch

from corogen import pipeline
from corogen.adapters.bench.floor import floor_of, measure_ceilings, model_sizes
from corogen.adapters.bench.random_model import make_folder
from corogen.wire.messages import Sampling, SlotBlocks, SlotInit, StepInput
from corogen.workers.runner import Runner
from tests.gpu import speed
from tests.model.driver import load

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def decode_seconds(runner: Runner, lengths: list[int], steps: int = 30) -> float:
    """A step over rows that have so many tokens in the cache; what these are does not matter."""
    block_size = 64
    blocks, first = [], 0
    for slot, length in enumerate(lengths):
        count = -(-(length + 3 * steps + 2) // block_size)
        blocks.append(SlotBlocks(slot, list(range(first, first + count))))
        first += count
    init = [SlotInit(slot, 1, length, Sampling()) for slot, length in enumerate(lengths)]
    rows = list(range(len(lengths)))
    runner.launch(StepInput(0, 0, init, blocks, rows, [])).wait()
    times = []
    for _ in range(3):  # of steps that are queued one behind the other, as the engine does
        began = time.perf_counter()
        pending = [runner.launch(StepInput(0, 0, [], [], rows, [])) for _ in range(steps)]
        pending[-1].wait()
        times.append((time.perf_counter() - began) / steps)
    return statistics.median(times)


def test_a_long_sequence_among_short_ones_does_not_hold_up_the_step(tmp_path) -> None:
    folder = make_folder("llama-1b", tmp_path)
    runner, _ = load(
        folder, device="cuda", block_size=64, num_blocks=256 * 16 + 520, max_slots=256, max_step_tokens=2048,
        session_len=33_000, random_weights=True,
    )  # fmt: skip
    short = decode_seconds(runner, [656] * 256)
    skewed = decode_seconds(runner, [656] * 255 + [32_000])
    print(f"256 short rows {short * 1e3:.3f} ms, one of them 32,000 tokens long {skewed * 1e3:.3f} ms")
    assert skewed <= 1.15 * short


def test_one_row_of_an_8b_model_is_near_the_copy_bandwidth(tmp_path) -> None:
    folder = make_folder("qwen3-8b", tmp_path)
    ceilings = measure_ceilings("cuda", "bfloat16")
    runner, _ = load(
        folder, device="cuda", block_size=64, num_blocks=64, max_slots=1, max_step_tokens=512, session_len=2048,
        random_weights=True,
    )  # fmt: skip
    lengths = [600]
    found = decode_seconds(runner, lengths)
    floor = floor_of(model_sizes(folder, 2), ceilings, lengths, 2).step_s
    print(f"step {found * 1e3:.3f} ms; floor {floor * 1e3:.3f} ms at {ceilings.bytes_per_s / 1e12:.2f} TB/s")
    torch.cuda.empty_cache()
    assert floor / found >= 0.75


def test_256_streams_are_smooth(tmp_path) -> None:
    with pipeline(str(make_folder("llama-1b", tmp_path)), speed.settings(None)) as pipe:
        asyncio.run(speed.measure(pipe, "8x16", 0))
        found = asyncio.run(speed.measure(pipe, "256x512", 1))
    print(found)
    middle, high = found["itl_ms"]
    assert high <= 3 * middle
    assert found["tokens_a_piece"] == 1
