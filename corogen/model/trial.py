"""One forward of a family's model in small, which shows how it can be cut into stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from corogen.attention.base import forward_context
from corogen.attention.probe import Probe
from corogen.errors import UnsupportedModel
from corogen.model import hf
from corogen.model.shrink import shrunken
from corogen.model.stage_parts import output_size

_TOKENS = 5


class Split(NamedTuple):
    """Where a family's models can be cut; modules by their names."""

    #: the list of layers
    stack: str
    #: modules that only prepare the first layer's input, or do nothing
    before: tuple[str, ...]
    #: modules that only work on the last layer's output
    after: tuple[str, ...]
    #: layers return tuples of so many, of which the first are hidden states; None: just hidden states
    width: int | None


class Trial(NamedTuple):
    """A small model, never run itself, and what a copy of it gave."""

    model: Any
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    #: [tokens, vocabulary]
    logits: torch.Tensor
    split: Split


def try_small(config: Any, dtype: torch.dtype) -> Trial:
    """Run a small model of the config's family on a CPU and watch it.

    Raises:
        UnsupportedModel: its layers are no plain sequence.
    """
    model = _small_model(config, dtype)
    twin = copy.deepcopy(model)
    ids = torch.arange(3, 3 + _TOKENS)
    positions = torch.arange(_TOKENS)
    watch = _Watch(twin)
    with forward_context(Probe()):
        logits = hf.forward(twin, ids, positions, torch.arange(_TOKENS))
    return Trial(model, ids, positions, logits, watch.split())


def _small_model(config: Any, dtype: torch.dtype) -> Any:
    """The same numbers each time, large enough that every layer matters."""
    with hf.quiet():
        model = hf.build_model(shrunken(config), dtype)
    generator = torch.Generator().manual_seed(0)
    for name, param in list(model.named_parameters()):
        parent, _, leaf = name.rpartition(".")
        value = torch.empty(param.shape, dtype=torch.float32).normal_(generator=generator)
        value = value * 0.1 + 1 if param.ndim < 2 else value * max(param.shape[-1], 1) ** -0.5
        model.get_submodule(parent)._parameters[leaf] = nn.Parameter(value.to(dtype), requires_grad=False)
    return model


class _Call(NamedTuple):
    """One call of a module outside the layers."""

    #: layers that had begun and ended
    begun: int
    ended: int
    #: it gave what a stand-in can give: [1, T, output_size]
    plain: bool


class _Watch:
    """Hooks on a model: in which order its layers run, and which modules run before and behind them."""

    def __init__(self, model: Any) -> None:
        self._stack = hf.layer_stack(model)
        self._layers = list(model.get_submodule(self._stack))
        self._begun: list[nn.Module] = []
        self._outputs: list[Any] = []
        self._calls: dict[str, list[_Call]] = {name: [] for name in _outside(model, self._stack)}
        for layer in self._layers:
            layer.register_forward_pre_hook(lambda layer, args: self._begun.append(layer))
            layer.register_forward_hook(lambda layer, args, output: self._outputs.append(output))
        for name in self._calls:
            model.get_submodule(name).register_forward_hook(self._note(name))

    def _note(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            plain = isinstance(output, torch.Tensor) and output.shape == (1, _TOKENS, output_size(module))
            self._calls[name].append(_Call(len(self._begun), len(self._outputs), plain))

        return note

    def split(self) -> Split:
        """What was seen."""
        total = len(self._layers)
        if self._begun != self._layers or len(self._outputs) != total:
            raise UnsupportedModel("it does not run its layers one after the other, each once")
        return Split(
            self._stack,
            tuple(name for name, calls in self._calls.items() if all(c.begun == 0 and c.plain for c in calls)),
            tuple(name for name, calls in self._calls.items() if calls and all(c.ended == total for c in calls)),
            self._tuple_width(),
        )

    def _tuple_width(self) -> int | None:
        if all(isinstance(o, torch.Tensor) for o in self._outputs):
            return None
        widths = {len(o) if isinstance(o, tuple) and isinstance(o[0], torch.Tensor) else 0 for o in self._outputs}
        if len(widths) != 1 or 0 in widths:
            raise UnsupportedModel("its layers do not hand on hidden states")
        return widths.pop()


def _outside(model: nn.Module, stack: str) -> Iterator[str]:
    """The largest modules with parameters that hold no layers."""
    path = stack.split(".")
    parents = [".".join(path[:i]) for i in range(len(path))]
    for parent in parents:
        for name, child in model.get_submodule(parent).named_children():
            full = f"{parent}.{name}" if parent else name
            if full not in parents and full != stack and next(child.parameters(), None) is not None:
                yield full
