"""A config of the same family and features whose model takes a few hundred kilobytes."""

from __future__ import annotations

import copy
from typing import Any

#: layers of the small model, unless it takes more to have one of each type
_LAYERS = 4

#: what has one of these names, and is a number, gets the value if it is larger
_SMALLER = {
    "vocab_size": 64,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": 0,
}


def shrunken(config: Any) -> Any:
    """A copy of a transformers config with few and narrow layers, experts and ids.

    Heads keep their size, which rotary embeddings are made for, and there are as many for each key head as before or
    fewer. Lists with an entry a layer keep the entries of the layers that are left.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for part in vars(small).values():
        if hasattr(part, "to_dict") and part is not text:
            _flatten(part)
    _drop_layers(text)
    _narrow(text)
    for name, value in _SMALLER.items():
        old = getattr(text, name, None)
        if isinstance(old, int) and not isinstance(old, bool) and old > value:
            setattr(text, name, value)
    return small


def _flatten(part: Any) -> None:
    """One layer for an encoder of images or sound, which text does not run through."""
    for name in ("num_hidden_layers", "depth", "encoder_layers", "num_layers"):
        if isinstance(getattr(part, name, None), int):
            setattr(part, name, 1)


def _drop_layers(text: Any) -> None:
    count = int(text.num_hidden_layers)
    kept = _kept_layers(count, getattr(text, "layer_types", None))
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == count and count > 1:
            setattr(text, name, type(value)(value[i] for i in kept))
    text.num_hidden_layers = len(kept)


def _kept_layers(count: int, types: list[str] | None) -> list[int]:
    """The first of each type, and others from the front until there are enough."""
    firsts = {types.index(t) for t in types} if types and len(types) == count else set()
    others = [i for i in range(count) if i not in firsts]
    return sorted([*firsts, *others[: max(_LAYERS - len(firsts), 0)]])


def _narrow(text: Any) -> None:
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
    few = min(heads, 4)
    text.num_attention_heads = few
    for name in ("num_key_value_heads", "num_kv_heads"):
        kv_heads = getattr(text, name, None)
        if kv_heads is not None:
            setattr(text, name, few if kv_heads == heads else min(int(kv_heads), max(few // 2, 1)))
    text.hidden_size = few * head_dim
    if getattr(text, "word_embed_proj_dim", None) is not None:
        text.word_embed_proj_dim = text.hidden_size if text.word_embed_proj_dim == hidden else few * head_dim // 2
