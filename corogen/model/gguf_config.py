"""What a GGUF file's metadata says about the model, in the words of transformers' config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from corogen.errors import UnsupportedModel

#: general.architecture -> transformers' model type
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
}

_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logits_scaling",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
}

#: keys by which llama.cpp marks what we would compute wrongly
_REFUSED = ("expert_count", "rope.scaling.attn_factor", "attention.causal", "ssm.conv_kernel")

#: (factor, original length) of the published Llama 3 variants; only the resulting factors are in the file
_LLAMA3_VARIANTS = ((8.0, 8192), (32.0, 8192), (16.0, 8192), (4.0, 8192))


class Metadata:
    """A file's key-value pairs; keys of the architecture without their prefix."""

    def __init__(self, pairs: Mapping[str, Any]) -> None:
        self._pairs = pairs
        self.architecture = str(pairs.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a full key."""
        return self._pairs.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self._pairs[key]

    def own(self, key: str, default: Any = None) -> Any:
        """The value of the architecture's own key, such as `block_count`."""
        return self._pairs.get(f"{self.architecture}.{key}", default)

    def named(self, prefix: str) -> dict[str, Any]:
        """{rest of the key: value} of all keys that begin with `prefix`."""
        return {k.removeprefix(prefix): v for k, v in self._pairs.items() if k.startswith(prefix)}


def model_config(metadata: Metadata, tensors: Set[str], rope_factors: list[float] | None) -> dict[str, Any]:
    """The contents of config.json. `tensors` are the file's names.

    Raises:
        UnsupportedModel: an architecture or a setting that would be computed wrongly.
        KeyError: a key that no model can do without.
    """
    kind = ARCHITECTURES.get(metadata.architecture)
    if kind is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(
            f"GGUF files of the architecture {metadata.architecture!r} can not be read; only {known}"
        )
    _refuse(metadata, tensors)
    config: dict[str, Any] = {"model_type": kind, "dtype": "float32"}
    config |= {ours: v for theirs, ours in _FIELDS.items() if (v := metadata.own(theirs)) is not None}
    for needed in ("block_count", "embedding_length", "attention.head_count"):
        if metadata.own(needed) is None:
            raise KeyError(f"{metadata.architecture}.{needed}")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["vocab_size"] = metadata.own("vocab_size") or len(metadata["tokenizer.ggml.tokens"])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config |= _special(kind, metadata, tensors)
    theta = config.pop("rope_theta", 10000.0)
    config["rope_parameters"] = {"rope_theta": theta, **_rope(metadata, rope_factors, config["head_dim"], theta)}
    return config | _rope_by_layer(kind, config["rope_parameters"])


def _refuse(metadata: Metadata, tensors: Set[str]) -> None:
    for key in _REFUSED:
        if metadata.own(key):
            raise UnsupportedModel(
                f"{metadata.architecture}.{key}={metadata.own(key)!r} is not supported in GGUF files"
            )
    if any(name.startswith("rope_factors_") for name in tensors):
        raise UnsupportedModel("long and short rope factors are not supported in GGUF files")
    heads = metadata.own("attention.head_count")
    if isinstance(heads, list) or isinstance(metadata.own("attention.head_count_kv"), list):
        raise UnsupportedModel("GGUF files whose layers differ in their heads are not supported")


def _special(kind: str, metadata: Metadata, tensors: Set[str]) -> dict[str, Any]:
    """Settings that only some families have."""
    extra: dict[str, Any] = {}
    if kind in ("llama", "granite"):
        extra["attention_bias"] = "blk.0.attn_q.bias" in tensors
        extra["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if kind.startswith("gemma"):
        extra["query_pre_attn_scalar"] = _gemma_scalar(metadata)
    if kind == "phi3":
        extra["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    return extra


def _gemma_scalar(metadata: Metadata) -> int:
    """What queries are scaled by: no key holds it, but only the two largest models differ from their head size."""
    if (metadata.architecture, metadata.own("block_count")) in (("gemma2", 46), ("gemma3", 62)):
        return int(metadata.own("embedding_length") // metadata.own("attention.head_count"))
    return int(metadata.own("attention.key_length", 256))


def _rope(metadata: Metadata, factors: list[float] | None, head_dim: int, theta: float) -> dict[str, Any]:
    rotary = metadata.own("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise UnsupportedModel(
            f"rotary positions over {rotary} of {head_dim} dimensions are not supported in GGUF files"
        )
    if factors is not None:
        return _llama3(factors, head_dim, theta)
    kind = metadata.own("rope.scaling.type", "none")
    if kind in ("none", ""):
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"the rope scaling {kind!r} is not supported in GGUF files")
    found = {"rope_type": kind, "factor": float(metadata.own("rope.scaling.factor", 1.0))}
    original = metadata.own("rope.scaling.original_context_length")
    if kind == "yarn" and original:
        found["original_max_position_embeddings"] = int(original)
    return found


def _llama3(factors: list[float], head_dim: int, theta: float) -> dict[str, Any]:
    """The Llama 3 scaling that gives these factors, which are all that the file holds."""
    for factor, original in _LLAMA3_VARIANTS:
        if np.allclose(llama3_factors(head_dim, theta, factor, original), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModel("rope_freqs.weight of this file belongs to no known Llama 3 scaling")


def llama3_factors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """[head_dim / 2], what each rotary frequency is divided by."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - 1.0) / 3.0, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _rope_by_layer(kind: str, full: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3 has plain rotary positions of base 10,000 in its sliding layers."""
    if kind != "gemma3_text":
        return {}
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
