"""One tiny forward that checks that a model's attention is ours, layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from corogen.attention.base import forward_context
from corogen.attention.probe import LayerFacts, Probe
from corogen.errors import UnsupportedModel
from corogen.model import hf


def probe_layers(model: Any, config: Any, device: torch.device) -> list[LayerFacts]:
    """Run two tokens through the model and return its attention layers in order.

    Raises:
        UnsupportedModel: a layer never reached our attention, or asks for something that it does not do.
    """
    probe = Probe()
    ids = torch.zeros(2, dtype=torch.long, device=device)
    with forward_context(probe):
        hf.forward(model, ids, torch.arange(2, device=device), torch.ones(1, dtype=torch.long, device=device))
    text = config.get_text_config()
    wanted = int(text.num_hidden_layers)
    if len(probe.layers) != wanted:
        raise UnsupportedModel(
            f"{len(probe.layers)} of the {wanted} layers of {config.model_type} use transformers' attention interface; "
            "the others would be computed wrongly"
        )
    _check_windows(text, probe.layers)
    return probe.layers


def _check_windows(text: Any, layers: list[LayerFacts]) -> None:
    """A layer that the config calls sliding must have asked for its window, and no other may."""
    types = getattr(text, "layer_types", None)
    for i, (kind, facts) in enumerate(zip(types or (), layers, strict=False)):
        if (kind == "sliding_attention") != (facts.window is not None):
            raise UnsupportedModel(
                f"layer {i} is {kind} by the config, but asks for the window {facts.window} in its attention"
            )
