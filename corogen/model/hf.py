"""Everything that touches transformers beyond its public front door. The only file to read when it changes."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights, no_tie_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from corogen.attention.base import attention
from corogen.errors import ModelError, ModelNotFound, UnsupportedModel
from corogen.model.rotary import Rotary

ATTENTION = "corogen"

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Positions(NamedTuple):
    """How far a model can address, and what to tell the user about it."""

    limit: int
    warnings: list[str]


def load_config(folder: Path, overrides: dict[str, Any]) -> Any:
    """The configuration in `folder` with `overrides` applied to its keys (dictionaries are merged).

    Raises:
        ModelNotFound, ModelError, UnsupportedModel
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} holds no config.json: it is not a model folder")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    merged = _merge(stored, overrides)
    _check_rope(merged)
    return _make_config(merged, path)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; a dictionary in both is merged key by key."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _make_config(stored: dict[str, Any], path: Path) -> Any:
    model_type = stored.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{path}: model_type {model_type!r} is unknown to transformers {transformers.__version__}"
            + (", and code inside a model's folder is never run" if "auto_map" in stored else "")
        )
    fields = {k: v for k, v in stored.items() if k != "auto_map"}
    try:
        return transformers.CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:
        raise ModelError(f"{path} can not be used: {error}") from error


def _rope_settings(stored: Any) -> Iterator[dict[str, Any]]:
    """Every rope setting in a config's rope_scaling or rope_parameters; newer ones are nested by layer type."""
    if isinstance(stored, dict):
        if "rope_type" in stored or "type" in stored:
            yield stored
        for value in stored.values():
            yield from _rope_settings(value)


def _check_rope(stored: dict[str, Any]) -> None:
    known = {"default", "mrope", *ROPE_INIT_FUNCTIONS}
    for key in ("rope_scaling", "rope_parameters"):
        for setting in _rope_settings(stored.get(key)):
            name = setting.get("rope_type", setting.get("type"))
            if name not in known:
                raise UnsupportedModel(
                    f"{key} has the unknown rope type {name!r}; transformers knows {', '.join(sorted(known))}"
                )


def check_layers(config: Any) -> None:
    """Raise UnsupportedModel for layers that are no plain or sliding attention, and for encoder-decoders."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder; only decoders can be served")
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise UnsupportedModel(f"{config.model_type} has layers of the type {', '.join(sorted(others))}")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel("quantised checkpoints (quantization_config) are not supported")


def positions(config: Any) -> Positions:
    """How many positions the model can address, rope scaling taken into account."""
    text = config.get_text_config()
    declared = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2048)
    limit, warnings = declared, []
    stored = getattr(text, "rope_parameters", None)
    by_layer = isinstance(stored, dict) and "rope_type" not in stored
    for setting in _rope_settings(stored):
        kind = setting.get("rope_type", "default")
        original = setting.get("original_max_position_embeddings")
        if kind == "linear" and not by_layer:  # configs with a setting for each layer type declare the scaled length
            limit = int(declared * setting["factor"])
        elif kind == "yarn":
            limit = max(declared, int((original or declared) * setting["factor"]))
        elif kind == "dynamic" or (kind == "longrope" and (original or declared) < declared):
            limit = int(original or declared)
            warnings.append(
                f"{kind} rope changes with the longest sequence of a batch: positions are limited to {limit}, "
                "where it has not changed yet"
            )
    return Positions(limit, warnings)


def vocab_size(model: nn.Module) -> int:
    """Rows of the input embedding, whoever holds it."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])


def stored_dtype(config: Any) -> torch.dtype | None:
    """The dtype that the checkpoint says it has."""
    value = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return getattr(torch, value, None) if isinstance(value, str) else value


def build_model(config: Any, dtype: torch.dtype) -> Any:
    """The unmodified class with our attention; parameters on the meta device, buffers real, nothing tied yet.

    Raises:
        UnsupportedModel: transformers has no such decoder, or it does not use the attention interface.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    _quiet_config(config)
    try:
        with _parameters_on_meta(), no_init_weights(), no_tie_weights():
            classes: Any = AutoModelForCausalLM
            model = classes.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise UnsupportedModel(f"{config.model_type} can not be served: {error}") from error
    # the flag on the class is no guide: some families lack it and use the interface, some have it from a base class
    uses_interface = hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
    if not uses_interface or getattr(model.config, "_attn_implementation", None) != ATTENTION:
        raise UnsupportedModel(f"{config.model_type} does not use transformers' attention interface")
    return model.eval()


def _quiet_config(config: Any) -> None:
    """Settings that only training and other front ends use, and that would cost time or outputs here."""
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(config, name, False):
            setattr(config, name, False)


def layer_stack(model: nn.Module) -> str:
    """The name of the list that holds the decoder's layers.

    Raises:
        UnsupportedModel: there is none, or more than one that could be it.
    """
    config: Any = model.config
    count = int(config.get_text_config().num_hidden_layers)
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise UnsupportedModel(f"it has not one list of its {count} layers but {', '.join(outer) or 'none'}")
    return str(outer[0])


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that modules register inside the block hold no memory; buffers (rope frequencies) stay real."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and param.device.type != "meta":
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)

    modules: Any = nn.Module
    modules.register_parameter = register
    try:
        yield
    finally:
        modules.register_parameter = original


def use_own_rotary(model: Any) -> None:
    """The model's module turns queries and keys with our function, as far as it computes the same."""
    module = sys.modules[type(model).__module__]
    original = getattr(module, "apply_rotary_pos_emb", None)
    if original is not None and not isinstance(original, Rotary):
        module.apply_rotary_pos_emb = Rotary(original)  # type: ignore[attr-defined]


def forward(
    model: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logits_at: torch.Tensor,
    *,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [rows, vocabulary] at the places `logits_at` of the packed tokens `input_ids` [T]; or instead of ids with
    `hidden` [T, hidden] in place of their embeddings."""
    tokens = {"inputs_embeds": hidden[None]} if hidden is not None else {"input_ids": input_ids[None]}
    output = model(**tokens, position_ids=position_ids[None], use_cache=False, logits_to_keep=logits_at)
    logits: torch.Tensor = output.logits[0]
    return logits


# --- weights ---------------------------------------------------------------------------------------------------------


class KeyMapper:
    """Turns a checkpoint's tensor names into parameter names, and merges tensors where the class wants one."""

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        """`names` are those of all parameters and buffers that the model has when it is whole."""
        self._model = model
        mapping = get_model_conversion_mapping(model)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        self._state = dict.fromkeys(names, True)
        self._pending: dict[str, Any] = {}

    def map(self, name: str) -> tuple[str, str | None]:
        """The parameter that `name` belongs to, and the pattern of the conversion it needs (None: none)."""
        result: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._model.base_model_prefix, self._state
        )
        return result

    def collect(self, target: str, pattern: str, name: str, read: Callable[[], torch.Tensor]) -> None:
        """Keep a tensor for the conversion of `target`; nothing is read yet."""
        if target not in self._pending:
            self._pending[target] = copy.deepcopy(self._by_pattern[pattern])
        self._pending[target].add_tensor(target, name, pattern, read)

    def converted(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert what was collected, one target at a time."""
        for target in list(self._pending):
            converter = self._pending.pop(target)
            for name, value in converter.convert(target, model=self._model, config=self._model.config).items():
                yield name, value[0] if isinstance(value, list) else value


def ignored_keys(model: Any) -> list[re.Pattern[str]]:
    """Names that a checkpoint may hold although the class has no place for them."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [re.compile(p) for p in (*patterns, r"rotary_emb\.inv_freq$")]


def keeps_float32(model: Any) -> Callable[[str], bool]:
    """Whether a parameter must stay in float32 although the model runs in 16 bits."""
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    pattern = re.compile("|".join(rf"(^|\.){re.escape(n)}(\.|$)" for n in names)) if names else None
    return lambda name: pattern is not None and pattern.search(name) is not None


def tied_parameters(model: Any) -> dict[str, str]:
    """{parameter: the parameter it shares memory with}, as the class and its config have it."""
    tied: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    return tied


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or hints of transformers on the console; errors still show."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
