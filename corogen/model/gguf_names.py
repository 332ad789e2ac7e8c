"""Which parameter of the transformers class each GGUF tensor is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH, get_tensor_name_map

#: transformers' model type -> the architecture in the `gguf` package's tables
_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "phi3": MODEL_ARCH.PHI3,
    "granite": MODEL_ARCH.GRANITE,
    "olmo2": MODEL_ARCH.OLMO2,
}


def parameter_names(config: dict[str, Any], folder: Path, num_layers: int) -> dict[str, str]:
    """{GGUF name: parameter name} for the class that `folder`/config.json describes."""
    import torch

    from corogen.model import hf

    with hf.quiet():
        model = hf.build_model(hf.load_config(folder, {}), torch.float32)
    table = get_tensor_name_map(_ARCHITECTURES[config["model_type"]], num_layers)
    names = {}
    for parameter, _ in model.named_parameters():
        stem, dot, suffix = parameter.rpartition(".")
        known = table.get_name(stem)
        if known is not None:
            names[known + dot + suffix] = parameter
    return names
