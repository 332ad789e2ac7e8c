"""Folders without weights in the shape of well-known models: speed does not depend on what the weights are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corogen.errors import ConfigError

_COMMON: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        **_COMMON,
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
        **_COMMON,
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


def make_folder(shape: str, folder: Path) -> Path:
    """Write a config.json and a tokenizer with a word for every id into `folder`, and return it.

    `shape` is one of SHAPES, a config.json, or a folder with one.

    Raises:
        ConfigError: `shape` is nothing of that, or its config can not be read.
    """
    fields = _fields(shape)
    (folder / "config.json").write_text(json.dumps(fields))
    _write_tokenizer(folder, int(fields["vocab_size"]))
    return folder


def _fields(shape: str) -> dict[str, Any]:
    if shape in SHAPES:
        return SHAPES[shape]
    path = Path(shape)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"--random-weights {shape!r} is none of {', '.join(SHAPES)}, and no config.json either")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        int(fields["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no config.json of a text model with a vocab_size: {error!r}") from error
    return dict(fields)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from corogen.testing.tiny import tiny_tokenizer

    tiny_tokenizer(folder)
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    words = stored["model"]["vocab"]
    known = {*words.values(), *(t["id"] for t in stored["added_tokens"])}
    words.update({f"\u0120x{i}": i for i in range(vocab_size) if i not in known})
    path.write_text(json.dumps(stored), encoding="utf-8")
