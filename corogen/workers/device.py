"""Which device a worker computes on."""

from __future__ import annotations

import torch

from corogen.errors import ConfigError


def choose_device(wanted: str) -> torch.device:
    """`wanted` ("cpu", "cuda", "cuda:1"), or for "auto" a GPU if torch can use one.

    Raises:
        ConfigError: a GPU is wanted that torch can not use; says why.
    """
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(wanted)
    if device.type == "cuda":
        _check_cuda(device)
        return torch.device("cuda", device.index or 0)
    return device


def _check_cuda(device: torch.device) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        raise ConfigError(
            f"device_type='cuda' needs a torch that was built for GPUs, and torch {torch.__version__} was built for "
            "CPUs: install another build, or use device_type='cpu'"
        )
    if not torch.cuda.is_available():
        raise ConfigError("device_type='cuda': torch finds no usable GPU or driver; see `nvidia-smi`")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(f"devices names GPU {device.index}, and there are {count}: they are numbered from 0")
