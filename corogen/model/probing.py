"""One tiny forward that checks that a model's attention is ours, layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from corogen.attention.base import forward_context
from corogen.attention.probe import LayerFacts, Probe
from corogen.errors import UnsupportedModel
from corogen.model.stages import stage_of, try_tokens


def probe_layers(model: Any, config: Any, device: torch.device) -> list[LayerFacts]:
    """Run two tokens through the model and return its attention layers in order; a stage's, if the model is one.

    Raises:
        UnsupportedModel: a layer never reached our attention, or asks for something that it does not do.
    """
    probe = Probe()
    with forward_context(probe):
        try_tokens(model, 2, device)
    text, stage = config.get_text_config(), stage_of(model)
    wanted = range(int(text.num_hidden_layers)) if stage is None else stage.layers
    if len(probe.layers) != len(wanted):
        raise UnsupportedModel(
            f"{len(probe.layers)} of the {len(wanted)} layers of {config.model_type} use transformers' attention "
            "interface; the others would be computed wrongly"
        )
    _check_windows(text, wanted, probe.layers)
    return probe.layers


def _check_windows(text: Any, numbers: range, layers: list[LayerFacts]) -> None:
    """A layer that the config calls sliding must have asked for its window, and no other may."""
    types = getattr(text, "layer_types", None) or ()
    for i, kind, facts in zip(numbers, types[numbers.start : numbers.stop], layers, strict=False):
        if (kind == "sliding_attention") != (facts.window is not None):
            raise UnsupportedModel(
                f"layer {i} is {kind} by the config, but asks for the window {facts.window} in its attention"
            )
