"""What transformers itself says about the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


def reference(path: Path, **changes: Any) -> Any:
    """The model in float32 with transformers' own eager attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32, **changes
    ).eval()


def reference_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary]"""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0]
    return logits.float().cpu()


def random_prompts(*lengths: int, vocab: int = 512, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
