"""How long work must take at least on a device: bytes over its bandwidth, operations over its rate.

Counted are the model's weights (once a step), keys and values (once a step for each row), and two operations a weight
and token. What attention computes, and everything small, is left out, so that no engine reaches the floor itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Ceilings(NamedTuple):
    """What a device gives, measured."""

    bytes_per_s: float
    flops_per_s: float


class Sizes(NamedTuple):
    """What a model needs."""

    #: weights that every token is multiplied with, the output layer left out
    layer_weights: int
    head_weights: int
    bytes_per_weight: int
    cache_bytes_per_token: int

    @property
    def step_bytes(self) -> int:
        """Weights that one step reads."""
        return (self.layer_weights + self.head_weights) * self.bytes_per_weight


class Floor(NamedTuple):
    """Least seconds of one round."""

    prompts_s: float
    decode_s: float
    #: the mean of the decode steps
    step_s: float


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """Copy a large tensor (bytes read and written) and multiply two large random matrices; medians of ten."""
    import torch

    large = device == "cuda"
    kind: torch.dtype = getattr(torch, dtype)
    copied = _copy_rate(1 << 30 if large else 64 << 20, device)
    size = 8192 if large else 1024
    a, b = torch.randn(2, size, size, device=device).to(kind)
    return Ceilings(copied, 2 * size**3 / _seconds(lambda: a @ b, device))


def _copy_rate(size: int, device: str) -> float:
    import torch

    source = torch.zeros(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source), device)


def _seconds(work: Callable[[], Any], device: str) -> float:
    import torch

    times = []
    for _ in range(13):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times[3:])[5]


def model_sizes(folder: Path, bytes_per_weight: int) -> Sizes:
    """Of a model folder's config, without its weights. Experts all count, though a token sees few of them."""
    import torch
    import transformers

    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config: Any = transformers.AutoConfig.for_model(**stored)
    classes: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = classes.from_config(config)
    text = config.get_text_config()
    head = model.get_output_embeddings().weight.numel()
    tables = {id(p): p.numel() for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    everything = sum(p.numel() for p in model.parameters())
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    cache = 2 * text.num_hidden_layers * kv_heads * dim * bytes_per_weight
    return Sizes(everything - sum(tables.values()), head, bytes_per_weight, cache)


def floor_of(sizes: Sizes, ceilings: Ceilings, prompts: Sequence[int], new_tokens: int) -> Floor:
    """Of `prompts` (their lengths) that all run at once, `new_tokens` each."""
    operations = 2 * (sizes.layer_weights * sum(prompts) + sizes.head_weights * len(prompts))
    prefill = max(operations / ceilings.flops_per_s, sizes.step_bytes / ceilings.bytes_per_s)
    product = 2 * (sizes.layer_weights + sizes.head_weights) * len(prompts) / ceilings.flops_per_s
    read = sizes.step_bytes / ceilings.bytes_per_s
    steps = []
    for done in range(1, new_tokens):
        cache = (sum(prompts) + done * len(prompts)) * sizes.cache_bytes_per_token / ceilings.bytes_per_s
        steps.append(max(product, read) + cache)
    return Floor(prefill, sum(steps), sum(steps) / len(steps) if steps else 0.0)
