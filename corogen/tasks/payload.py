"""Inputs and outputs on their way between the engine and its workers: pickled, tensors as raw memory.

Only processes that an engine started itself speak here, over descriptors that they inherit. Classes and functions of
`__main__` travel by value. Tensors arrive in memory of their own, on the reader's device.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle


def encode(value: Any) -> bytes:
    """`value` as bytes. Raises whatever pickling raises."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def decode(data: Any, device: Any = None) -> Any:
    """What `encode` was given. Tensors are placed on `device`; None: in main memory."""
    return _Unpickler(data, device).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """torch's own way makes a small file of every tensor, ten times as slow."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(obj, torch):
            flat = obj.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy() if flat.numel() else b""
            return _tensor, (pickle.PickleBuffer(data), obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _is_plain(tensor: Any, torch: Any) -> bool:
    odd = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested
    return not odd and tensor.layout is torch.strided and tensor.device.type != "meta"


def _tensor(data: Any, dtype: Any, shape: tuple[int, ...], device: Any = None) -> Any:
    import torch

    if not len(data):
        return torch.empty(shape, dtype=dtype, device=device)
    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape)
    return tensor if device is None else tensor.to(device)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: Any, device: Any) -> None:
        super().__init__(io.BytesIO(data))
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        """Tensors go where the reader wants them."""
        found: Callable[..., Any] = super().find_class(module, name)
        return partial(_tensor, device=self._device) if found is _tensor else found
