"""Pipeline stages: the part of a model that one worker holds, and its forward."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from corogen.attention.base import forward_context
from corogen.attention.probe import Probe
from corogen.errors import ModelError, UnsupportedModel
from corogen.model import hf
from corogen.model.partition import stage_layers
from corogen.model.shard import Shard
from corogen.model.stage_parts import Entrance, ForeignLayer, Leaving, Passage, Unheld, leave
from corogen.model.trial import Split, Trial, try_small


@dataclass(frozen=True)
class Stage:
    """What a model holds of the whole. Noted on the model by `keep_stage`."""

    #: numbers of its layers in the whole model
    layers: range
    first: bool
    last: bool
    #: what is handed from stage to stage
    dtype: torch.dtype
    hidden_size: int
    #: names of the parameters and buffers of the whole model
    names: frozenset[str]
    #: beginnings of the names that other stages hold
    foreign: tuple[str, ...]
    #: as `hf.tied_parameters` of the whole model
    tied: dict[str, str]
    passage: Passage = field(default_factory=Passage)

    def holds(self, name: str) -> bool:
        """Whether a parameter of this name is the stage's own."""
        return not name.startswith(self.foreign)


def stage_of(model: Any) -> Stage | None:
    """The stage that the model was cut down to; None: it is whole."""
    stage: Stage | None = model.__dict__.get("corogen_stage")
    return stage


def keep_stage(model: Any, shard: Shard) -> None:
    """Cut a model whose parameters are on the meta device down to the shard's stage.

    What other stages hold is replaced by stand-ins without parameters; numbers and names of what is kept stay the
    same. A tied head is kept with a parameter of its own.

    Raises:
        ConfigError: the layers can not be shared out like this.
        UnsupportedModel: models of this family give something else when they are cut.
    """
    if shard.pp == 1:
        return
    layers = stage_layers(model.config.get_text_config().to_dict(), shard)
    _cut(model, find_split(model.config, model.dtype), layers)


def forward_stage(
    model: Any,
    input_ids: torch.Tensor,
    hidden: torch.Tensor | None,
    position_ids: torch.Tensor,
    logits_at: torch.Tensor,
) -> torch.Tensor:
    """One forward over T packed tokens.

    Args:
        input_ids: [T], for the first stage (and for a whole model); others do not look at them.
        hidden: [T, hidden], what the stage before returned; the first does not look at it.
        position_ids: [T]
        logits_at: [rows], places among the T tokens; only the last stage looks at it.

    Returns:
        The last stage: logits [rows, vocabulary]; others: hidden states [T, hidden].
    """
    stage = stage_of(model)
    if stage is None:
        return hf.forward(model, input_ids, position_ids, logits_at)
    received = None if stage.first else hidden
    stage.passage.received = None if received is None else received[None]
    try:
        return hf.forward(model, input_ids, position_ids, logits_at, hidden=received)
    except Leaving as leaving:
        return leaving.hidden[0]
    finally:
        stage.passage.received = None


def try_tokens(model: Any, count: int, device: torch.device) -> torch.Tensor:
    """What `forward_stage` gives for a few made-up tokens: the same each time.

    Raises:
        UnsupportedModel: the stage's layers return another dtype than the next stage expects.
    """
    stage = stage_of(model)
    hidden = None
    if stage is not None and not stage.first:
        made_up = torch.randn(count, stage.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden = made_up.to(device, stage.dtype)
    ids = torch.ones(count, dtype=torch.long, device=device)
    out = forward_stage(model, ids, hidden, torch.arange(count, device=device), ids[-1:] * (count - 1))
    if stage is not None and not stage.last and out.dtype != stage.dtype:
        raise UnsupportedModel(
            f"{model.config.model_type} computes with {out.dtype} between its layers although the model runs in "
            f"{stage.dtype}: use pp=1"
        )
    return out


def _cut(model: Any, split: Split, layers: range) -> None:
    stack = model.get_submodule(split.stack)
    first, last = layers.start == 0, layers.stop == len(stack)
    foreign = [f"{split.stack}.{i}" for i in range(len(stack)) if i not in layers]
    unheld = [*(() if first else split.before), *(() if last else split.after)]
    buffers = {name for name, _ in model.named_buffers()}
    stage = Stage(
        layers,
        first,
        last,
        model.dtype,
        int(model.config.get_text_config().hidden_size),
        frozenset({*model.state_dict(), *buffers}),
        tuple(f"{name}." for name in (*foreign, *unheld)),
        hf.tied_parameters(model),
    )
    for i in range(len(stack)):
        if i not in layers:
            entrance = i == layers.start - 1
            stack[i] = (
                Entrance(stack[i], split.width, stage.passage) if entrance else ForeignLayer(stack[i], split.width)
            )
    for name in unheld:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Unheld(model.get_submodule(name), stage.passage))
    if not last:
        stack[layers.stop - 1].register_forward_hook(leave)
    model.__dict__["corogen_stage"] = stage


def find_split(config: Any, dtype: torch.dtype) -> Split:
    """How models of this config are cut; found out and tried on a small one, which takes some milliseconds.

    Raises:
        UnsupportedModel: the stages of the small model together give something else than the whole.
    """
    # a CPU computes every family in these two
    exact = dtype == torch.float32
    try:
        if getattr(config.get_text_config(), "num_kv_shared_layers", 0):
            raise UnsupportedModel("layers use keys and values of earlier layers")
        with torch.inference_mode():
            trial = try_small(config, torch.float32 if exact else torch.bfloat16)
            found = _in_stages(trial)
        difference = float((found - trial.logits).abs().max() / trial.logits.abs().max())
        if not difference <= (1e-5 if exact else 1e-2):
            raise UnsupportedModel(f"in small it gives other logits then, by {difference:.1e} of the largest")
    except Exception as error:
        reason = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        raise UnsupportedModel(
            f"{config.model_type} can not be cut into pipeline stages ({reason}): use pp=1"
        ) from error
    return trial.split


def _in_stages(trial: Trial) -> torch.Tensor:
    """The logits of the small model with each layer as a stage of its own."""
    count = len(trial.model.get_submodule(trial.split.stack))
    out = None
    for i in range(count):
        part = copy.deepcopy(trial.model)
        _cut(part, trial.split, range(i, i + 1))
        with forward_context(Probe()):
            at = torch.arange(len(trial.input_ids))
            out = forward_stage(part, trial.input_ids, out, trial.position_ids, at)
    if out is None:
        raise UnsupportedModel("it has no layers")
    return out
