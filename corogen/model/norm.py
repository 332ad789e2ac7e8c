"""RMS norms in few operations, in place of the six to eight that model classes write them with."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn.functional import rms_norm

from corogen.model.devices import kernels_work


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        """With a `dtype` of its own the weight is wider than what is normalised, and only the product is rounded."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._size, self.eps = weight.shape, eps
        self._few_operations = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._own_kernel = kernels_work(weight.device)
        self.early = dtype is None
        self._eps_tensor = weight.new_full((), eps)
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden]; returns the same shape and dtype."""
        if self._own_kernel:
            return self._one_kernel(x)
        if not self._few_operations:
            return rms_norm(x, self._size, self.weight, self.eps)
        # torch has one fused kernel for this on a GPU, and none on a CPU; its vector_norm is one there
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, norm, norm, value=1 / self._size[0]).rsqrt_()
        return (x * scale).mul_(self.weight)

    def _one_kernel(self, x: torch.Tensor) -> torch.Tensor:
        from corogen.model.triton_parts import rms_norm as one_kernel

        known, self._known = self._known, None
        if known is not None and known[0] is x:
            return known[1]
        return one_kernel(x, self.weight, self.eps, self.early)

    @property
    def adds(self) -> bool:
        """Whether `after_sum` can be used."""
        return self._own_kernel

    def after_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x + residual, and its norm, in one kernel."""
        from corogen.model.triton_parts import sum_and_rms_norm

        return sum_and_rms_norm(x, residual, self.weight, self.eps, self.early)

    def sum_for_later(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x + residual. If the very tensor is what this norm is called with next, its result is there already."""
        total, normed = self.after_sum(x, residual)
        self._known = total, normed
        return total


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
    weight = weight.detach()
    candidates = [RMSNorm(weight, eps)]
    # some families store the weight's distance from one; 16 bits would round that
    if weight.dtype == torch.float32:
        candidates.append(RMSNorm(weight + 1, eps))
    elif kernels_work(weight.device):
        candidates.append(RMSNorm(weight.float() + 1, eps, weight.dtype))
    return next((ours for ours in candidates if _agree(norm, ours, weight)), None)


def _agree(norm: nn.Module, ours: RMSNorm, weight: torch.Tensor) -> bool:
    """Whether both give the same for random input, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, len(weight), generator=generator).mul_(3).to(weight.device, weight.dtype)
    wanted, found = norm(x), ours(x)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    return bool(wanted.dtype == found.dtype and torch.allclose(wanted, found, rtol=tolerance, atol=tolerance))
