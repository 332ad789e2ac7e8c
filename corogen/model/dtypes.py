"""Which dtype a model runs in."""

from __future__ import annotations

import torch

from corogen.errors import ConfigError


def choose_dtype(wanted: str, stored: torch.dtype | None, device: torch.device) -> tuple[torch.dtype, list[str]]:
    """The dtype to compute in, and at most one line for the user about it.

    "auto" is the checkpoint's own on a GPU (float16 where the GPU has no bfloat16) and float32 on a CPU.

    Raises:
        ConfigError: the device can not compute in `wanted`.
    """
    if wanted != "auto":
        return _explicit(wanted, device), []
    if device.type == "cpu":
        differs = stored is not None and stored != torch.float32
        return torch.float32, [f"the checkpoint is {_name(stored)}; a CPU computes in float32"] if differs else []
    if stored == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16, ["the checkpoint is bfloat16, which this GPU lacks; float16 is used"]
    return stored or torch.float16, []


def _explicit(wanted: str, device: torch.device) -> torch.dtype:
    if device.type == "cpu" and wanted == "float16":
        raise ConfigError("dtype='float16' is not for CPUs: use 'float32' (fastest and exact) or 'bfloat16'")
    if device.type == "cuda" and wanted == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError("dtype='bfloat16' needs a GPU of compute capability 8.0 or newer: use 'float16'")
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
