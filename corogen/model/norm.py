"""RMS norms in few operations, in place of the six to eight that model classes write them with."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._size, self._eps = weight.shape, eps
        self._few_operations = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._eps_tensor = weight.new_full((), eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden]; returns the same shape and dtype."""
        if not self._few_operations:
            return rms_norm(x, self._size, self.weight, self._eps)
        # torch has one fused kernel for this on a GPU, and none on a CPU; its vector_norm is one there
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, norm, norm, value=1 / self._size[0]).rsqrt_()
        return (x * scale).mul_(self.weight)


def replace_norms(model: nn.Module) -> None:
    """Replace every RMS norm of the model that ours agrees with; others (and other formulas) stay as they are."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            ours = _replacement(child)
            if ours is not None:
                setattr(module, name, ours)


def _replacement(norm: nn.Module) -> RMSNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not type(norm).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    if not isinstance(eps, float) or len(inspect.signature(norm.forward).parameters) != 1:
        return None
    candidates = [weight.detach()]
    if weight.dtype == torch.float32:  # some families store the weight's distance from one; 16 bits would round that
        candidates.append(weight.detach() + 1)
    return next((ours for w in candidates if _agree(norm, ours := RMSNorm(w, eps))), None)


def _agree(norm: nn.Module, ours: RMSNorm) -> bool:
    """Whether both give the same for random input, up to rounding."""
    weight = ours.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, len(weight), generator=generator).mul_(3).to(weight.device, weight.dtype)
    wanted, found = norm(x), ours(x)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    return bool(wanted.dtype == found.dtype and torch.allclose(wanted, found, rtol=tolerance, atol=tolerance))
