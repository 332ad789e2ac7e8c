"""What a device can do."""

from __future__ import annotations

import importlib.util

import torch


def kernels_work(device: torch.device) -> bool:
    """Whether our Triton kernels can be used; plain torch operations do the same elsewhere."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
