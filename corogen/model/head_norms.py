"""Norms of queries and keys that attention itself computes, where the rotary embedding follows them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from corogen.attention.base import HeadNorms, Options, Pair, dense_attention, forward_context
from corogen.model.norm import RMSNorm
from corogen.model.stages import try_tokens


class _Watch:
    """Context of one tiny forward that sees what reaches the rotary embedding and attention."""

    def __init__(self) -> None:
        #: what the norms of a module have given: {norm: output}
        self.outputs: dict[nn.Module, torch.Tensor] = {}
        self.found: list[nn.Module] = []
        self._before: Pair | None = None
        self._after: Pair | None = None

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable[[], Pair]
    ) -> Pair:
        """At once."""
        self._before, self._after = (q, k), turn()
        return self._after

    def reject(self, reason: str) -> None:
        """The probe has refused everything unusual already."""

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Causal attention over the few tokens."""
        before, after, self._before, self._after = self._before, self._after, None, None
        if before is not None and after is not None and after[0] is q and after[1] is k:
            norms = [getattr(module, n, None) for n in ("q_norm", "k_norm")]
            if all(self._gave(norm, x) for norm, x in zip(norms, before, strict=True)):
                self.found.append(module)
        return dense_attention(q, k, v, options, causal=True).transpose(1, 2)

    def _gave(self, norm: nn.Module | None, x: torch.Tensor) -> bool:
        """Whether x [1, heads, T, D] is the norm's output [1, T, heads, D], turned around and nothing else."""
        given = self.outputs.get(norm) if isinstance(norm, RMSNorm) else None
        if given is None or given.ndim != 4:
            return False
        same = given.transpose(1, 2)
        return same.data_ptr() == x.data_ptr() and same.shape == x.shape and same.stride() == x.stride()


def leave_norms_to_attention(model: Any, device: torch.device) -> None:
    """Take `q_norm` and `k_norm` out of attention modules that end in our attention, and note them as
    `corogen_norms` there. Only for a context that heeds it, and that turns queries and keys itself."""
    norms = [m for name, m in model.named_modules() if name.endswith(("q_norm", "k_norm")) and isinstance(m, RMSNorm)]
    if not norms:
        return
    watch = _Watch()
    hooks = [n.register_forward_hook(lambda norm, _, output: watch.outputs.update({norm: output})) for n in norms]
    with forward_context(watch):
        try_tokens(model, 2, device)
    for hook in hooks:
        hook.remove()
    for module in watch.found:
        q_norm: Any = module.q_norm
        k_norm: Any = module.k_norm
        if (q_norm.eps, q_norm.early) == (k_norm.eps, k_norm.early):
            # not through setattr, which would register the weights as parameters
            module.__dict__["corogen_norms"] = HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.early)
            module.q_norm, module.k_norm = nn.Identity(), nn.Identity()
