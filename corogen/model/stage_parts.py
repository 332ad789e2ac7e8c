"""What stands in a stage's model where other stages hold the real modules.

The library's forward of the whole model runs on every stage, untouched: it computes rotary embeddings, picks each
layer's settings by its number, and so on. Only the stand-ins know of stages. On a later stage the last foreign layer
in front of the kept ones hands in what was received, whatever it is called with, so that nothing which happens to
embeddings on the way to the first layer counts. The last kept layer ends the forward, so that nothing behind it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Passage:
    """What the running forward received from the stage before: [1, T, hidden]."""

    def __init__(self) -> None:
        self.received: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """What was received."""
        if self.received is None:
            raise RuntimeError("a later pipeline stage was called without the hidden states of the stage before it")
        return self.received


class ForeignLayer(nn.Module):
    """A layer that another stage holds: hands on the hidden states it gets."""

    def __init__(self, layer: nn.Module, width: int | None) -> None:
        """`width`: the layers return tuples of so many, hidden states first; None: they return hidden states."""
        super().__init__()
        _copy_settings(layer, self)
        self._width = width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hidden states as the family's layers return them."""
        return self._as_layer(args[0] if args else kwargs["hidden_states"])

    def _as_layer(self, hidden: torch.Tensor) -> Any:
        return hidden if self._width is None else (hidden, *[None] * (self._width - 1))


class Entrance(ForeignLayer):
    """The foreign layer in front of the stage's own: hands on what was received."""

    def __init__(self, layer: nn.Module, width: int | None, passage: Passage) -> None:
        super().__init__(layer, width)
        self._passage = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer would return what was received."""
        return self._as_layer(self._passage.take())


class Unheld(nn.Module):
    """A module outside the layers that other stages hold. If it is called its output is zeros that nobody uses."""

    def __init__(self, module: nn.Module, passage: Passage) -> None:
        super().__init__()
        _copy_settings(module, self)
        self._width, self._passage = output_size(module), passage

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[1, T, output_size]"""
        received = self._passage.take()
        return received.new_zeros(*received.shape[:2], self._width or 0)


def output_size(module: nn.Module) -> int | None:
    """The last dimension of what an embedding, a linear or a norm returns; None for anything else."""
    for name in ("embedding_dim", "out_features", "nf"):
        if isinstance(size := getattr(module, name, None), int):
            return size
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(weight, torch.Tensor) and weight.ndim == 1 else None


class Leaving(BaseException):
    """Ends a forward behind the stage's last layer. No Exception, because model code may catch those."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def leave(layer: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a stage's last layer.

    Raises:
        Leaving: always.
    """
    raise Leaving(output if isinstance(output, torch.Tensor) else output[0])


def _copy_settings(source: nn.Module, target: nn.Module) -> None:
    """Numbers and words that model code may ask a layer or an embedding for, such as its attention's type."""
    for name, value in vars(source).items():
        if isinstance(value, str | int | float | bool) and not name.startswith("_"):
            target.__dict__.setdefault(name, value)
