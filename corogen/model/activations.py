"""Activations whose rows do not depend on what else is in the batch, on a CPU."""

from __future__ import annotations

import torch
from torch import nn

#: torch gives a thread no less than this many elements
_GRAIN = 32_768
#: what GELU gives to one thread; more goes to all of them
_GELU_GRAIN = 16_384
#: elements that vector instructions take at once, on any CPU
_VECTOR = 64
_ACTIVATIONS = (nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Mish)


class RowStable(nn.Module):
    """An elementwise activation, called so that every thread gets whole vectors.

    torch shares the elements out evenly, and what is left over behind a thread's last whole vector is computed by
    other instructions, which round differently: a row in the wrong place would come out differently than alone.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., T, W]; returns the same shape and dtype."""
        width = x.shape[-1]
        if width % _VECTOR:
            return self._by_rows(nn.functional.pad(x, (0, -width % _VECTOR)))[..., :width]
        # what is not contiguous is computed by other code, and one row always is
        return self._by_rows(x if isinstance(self.activation, nn.SiLU) else x.contiguous())

    def _by_rows(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[-2] if x.dim() > 1 else 1
        even = _even_rows(rows, x.numel() // rows, torch.get_num_threads())
        if even == rows:
            out: torch.Tensor = self.activation(x)
            return out
        if even == 0:  # a wide row or two: no part is worth a second thread
            parts = torch.split(x, max(_VECTOR, _GELU_GRAIN // rows // _VECTOR * _VECTOR), -1)
            return torch.cat([self.activation(part.contiguous()) for part in parts], -1)
        return torch.cat([self._by_rows(part) for part in torch.split(x, [even, rows - even], -2)], -2)


def _even_rows(rows: int, width: int, threads: int) -> int:
    """How many of the rows the threads can share so that each gets whole vectors."""
    for count in range(rows, 0, -1):
        size = count * width
        sharers = {min(threads, -(-size // _GRAIN)), threads if size > _GELU_GRAIN else 1}
        if all(size // _VECTOR % n == 0 for n in sharers):
            return count
    return 0


def stabilise_activations(model: nn.Module) -> None:
    """Wrap the model's activations where they are computed on a CPU."""
    # packed weights, which only a CPU has, are no parameters: a pipeline stage may have none left
    held = next(model.parameters(), None)
    if held is not None and held.device.type != "cpu":
        return
    for module in list(model.modules()):
        if not isinstance(module, RowStable):
            for name, child in list(module.named_children()):
                if isinstance(child, _ACTIVATIONS) or type(child).__module__ == "transformers.activations":
                    setattr(module, name, RowStable(child))
