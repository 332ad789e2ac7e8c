"""Which layers of a model each pipeline stage holds, from its config alone. Needs no torch.

A step passes through every stage, so the slowest one sets the pace: its layers, and the head on the last one, decide.
The embedding is looked up, which takes memory but no time; it decides between partitions of the same pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from corogen.errors import ConfigError
from corogen.model.shard import Shard

#: the names that families have for the same number
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner"),
    "expert": ("moe_intermediate_size", "intermediate_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}


def check_pp(config: Mapping[str, Any], pp: int, partition: Sequence[int] = ()) -> None:
    """Whether the model of this config (config.json, overrides merged) can be cut into `pp` stages.

    A config that does not tell its number of layers passes; a worker knows the family's default.

    Raises:
        ConfigError: naming the values and what to do.
    """
    layers = _number(_text(config), "layers")
    given = f"the partition {list(partition)}"
    if partition and len(partition) != pp:
        raise ConfigError(f"{given} has {len(partition)} stages and pp is {pp}: give one number of layers a stage")
    if any(n < 1 for n in partition):
        raise ConfigError(f"{given} leaves a stage without layers: give each at least 1")
    if layers is None:
        return
    if pp > layers:
        raise ConfigError(f"pp={pp} is more than the {layers} layers of the model: give pp={layers} or less")
    if partition and sum(partition) != layers:
        raise ConfigError(f"{given} adds up to {sum(partition)} layers and the model has {layers}")


def stage_layers(config: Mapping[str, Any], shard: Shard) -> range:
    """The layers of the shard's stage: as `shard.partition` has it, else balanced.

    Args:
        config: config.json, or a transformers config's `to_dict()`, with its number of layers.

    Raises:
        ConfigError: as `check_pp`.
    """
    check_pp(config, shard.pp, shard.partition)
    text = _text(config)
    count = _number(text, "layers")
    if count is None:
        raise ConfigError("the model's config does not tell its number of layers, so it can not be cut into stages")
    vocabulary = _vocabulary(text)
    sizes = shard.partition or balanced(count, shard.pp, vocabulary, vocabulary)
    first = sum(sizes[: shard.pp_rank])
    return range(first, first + sizes[shard.pp_rank])


def balanced(layers: int, pp: int, embedding: float, head: float) -> tuple[int, ...]:
    """Layers by stage; `embedding` and `head` are in layers. The slowest stage is as quick as can be, and of all such
    partitions it is the one whose stages are most alike in memory."""
    pace = _pace(layers, pp, head)
    #: {layers so far: (sum of the squares of the stages' memory, their layers)}
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(pp):
        behind = head if stage == pp - 1 else 0.0
        memory = behind + (embedding if stage == 0 else 0.0)
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for done, (cost, sizes) in best.items():
            for count in range(1, min(_fit(pace, behind), layers - done) + 1):
                candidate = (cost + (count + memory) ** 2, (*sizes, count))
                grown[done + count] = min(candidate, grown.get(done + count, candidate))
        best = grown
    return best[layers][1]


def _pace(layers: int, pp: int, head: float) -> float:
    """What the slowest stage takes at best, in layers."""
    paces: list[float] = [*range(1, layers + 1), *(n + head for n in range(1, layers + 1))]
    enough = (p for p in paces if p >= 1 + head and (pp - 1) * _fit(p, 0) + _fit(p, head) >= layers)
    return min(enough)


def _fit(pace: float, others: float) -> int:
    """Layers that a stage has time for besides `others`; sums of floats are a little off."""
    return int(pace - others + 1e-9)


def _vocabulary(text: Mapping[str, Any]) -> float:
    """The parameters of the embedding, and of the head, in layers; 0 when the config does not tell."""
    hidden, vocabulary = _number(text, "hidden"), text.get("vocab_size")
    heads = _number(text, "heads")
    if not (hidden and heads and isinstance(vocabulary, int)):
        return 0.0
    kv_heads = _number(text, "kv_heads") or heads
    head_dim = text.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    experts = _number(text, "experts")
    inner = _number(text, "expert" if experts else "inner") or 4 * hidden
    # three matrices are usual; families with two have them wider
    layer = attention + 3 * hidden * inner * (experts or 1)
    return float(vocabulary * hidden / layer)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the decoder."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _number(config: Mapping[str, Any], what: str) -> int | None:
    for name in _NAMES[what]:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
