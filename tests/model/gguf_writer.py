"""Writes tiny models as GGUF files in llama.cpp's layout, with the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives q and k of Llama models."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, file: Path, kind: gguf.GGMLQuantizationType, **tokens: Any) -> None:
    """A tiny model in llama.cpp's layout; norms stay in F32, as there."""
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.get("sliding_window") and arch.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if tokens:
        add_tokens(writer, **tokens)
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), config["num_hidden_layers"]
    )
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1
        stored = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokens(
    writer: gguf.GGUFWriter, tokens: list[str], kinds: list[int], merges: list[str], **metadata: Any
) -> None:
    writer.add_tokenizer_model(metadata.pop("model", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", "default"))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for name, value in metadata.items():
        if name != "pre":
            getattr(writer, f"add_{name}")(value)
