"""Throughput with random weights, and what share of the device's floor that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corogen.adapters.bench.floor import Ceilings, floor_of, measure_ceilings, model_sizes
from corogen.adapters.bench.throughput import measure
from corogen.adapters.bench.workload import varied_prompts

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

#: no answer of random weights contains it, and every answer is searched for it
STOP_WORD = "\u2603 never"


def measure_shaped(
    pipe: Pipeline,
    folder: Path,
    count: int,
    lengths: tuple[int, int],
    *,
    output_len: int,
    repeat: int,
    sampling: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """`repeat` rounds of `count` requests at once, with prompts of `lengths` tokens; returns a JSON-ready result."""
    ready = pipe.engine.ready
    vocab_size = pipe.engine.admission.facts.vocab_size

    def prompts(round_number: int) -> list[Any]:
        return varied_prompts(count, *lengths, vocab_size, seed=round_number)

    result = measure(
        pipe,
        prompts,
        output_len=output_len,
        ignore_eos=True,
        repeat=repeat,
        sampling={"stop_words": [STOP_WORD], **sampling},
        say=say,
    )
    kind = "cuda" if ready.device.startswith("cuda") else "cpu"
    say("what the device gives")
    ceilings = measure_ceilings(kind, ready.dtype)
    asked = [list(map(len, prompts(i + 1))) for i in range(repeat)]
    return {**result, "floor": _shares(folder, ready.dtype, ceilings, asked, result)}


def _shares(
    folder: Path, dtype: str, ceilings: Ceilings, asked: list[list[int]], result: dict[str, Any]
) -> dict[str, Any]:
    """The floor of the rounds, and how near to it they came: 1 would be as fast as the device can be."""
    sizes = model_sizes(folder, 4 if dtype == "float32" else 2)
    floors = [floor_of(sizes, ceilings, lengths, result["output_len"]) for lengths in asked]
    tokens = result["requests"] * result["output_len"]
    shares = [
        (floor.prompts_s + floor.decode_s) * rate / tokens
        for floor, rate in zip(floors, result["tok_per_s"]["values"], strict=True)
    ]
    step_ms = sorted(f.step_s for f in floors)[len(floors) // 2] * 1e3
    return {
        "bytes_per_s": ceilings.bytes_per_s,
        "flops_per_s": ceilings.flops_per_s,
        "share": sorted(shares)[len(shares) // 2],
        "step_ms": step_ms,
        "step_share": step_ms / result["tpot_ms"]["p50"],
    }
