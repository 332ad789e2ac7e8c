"""The one function that every attention layer of a transformers model calls, and the context it looks up.

Metadata of a batch travels in a context variable, because some families drop extra keyword arguments on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

Pair = tuple[torch.Tensor, torch.Tensor]


class Options(NamedTuple):
    """What a layer asks of its attention. A token attends to itself and the `window - 1` tokens before it."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    #: [heads], one extra logit a head that takes part in the softmax and has no value
    sinks: torch.Tensor | None = None


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys, head by head, that a layer leaves to its attention."""

    #: [D] each
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    #: the normalised value is rounded before the product with the weight
    early: bool


class Context(Protocol):
    """Computes attention for the batch of the running forward."""

    def attend(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """q [1, Hq, T, D], k and v [1, Hkv, T, D] of this step's tokens; returns [1, T, Hq, D]."""

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable[[], Pair]
    ) -> Pair:
        """q and k turned by their positions: what `turn` gives, or what they will be given in `attend`."""

    def reject(self, reason: str) -> None:
        """The layer asks for something that is not implemented."""


_active: ContextVar[Context] = ContextVar("corogen_attention")

#: tensors that some families hand over and that causal attention over a packed batch has no use for
_HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "hidden_states"})


@contextlib.contextmanager
def forward_context(context: Context) -> Iterator[None]:
    """Attention layers called inside the block use `context`."""
    token = _active.set(context)
    try:
        yield
    finally:
        _active.reset(token)


def active() -> Context | None:
    """The context of the forward of ours that the running code is part of, if it is."""
    return _active.get(None)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function as transformers calls it. Returns ([1, T, heads, D], None)."""
    context = _active.get()
    for reason in _unusual(module, attention_mask, others):
        context.reject(reason)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return context.attend(module, query, key, value, Options(scale, sliding_window, softcap, s_aux)), None


def _unusual(module: torch.nn.Module, mask: torch.Tensor | None, others: dict[str, Any]) -> Iterator[str]:
    if mask is not None:
        yield "brings its own attention mask"
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        yield "is not causal"
    for name, value in others.items():
        if isinstance(value, torch.Tensor) and name not in _HARMLESS:
            yield f"needs {name!r} in its attention"


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """q [B, Hq, Tq, D] over k, v [B, Hkv, Tk, D]; returns [B, Hq, Tq, Dv].

    `mask` is added to the scores ([B or 1, 1, Tq, Tk], in the dtype of q); `causal` needs Tq == Tk.
    """
    if options.softcap is None and options.sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=options.scaling, enable_gqa=grouped
        )
    if causal:
        mask = causal_mask(q.shape[2], 0, k.shape[2], 0, None, q.dtype, q.device)
    return _explicit_attention(q, k, v, options, mask)


def _explicit_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention step by step, for soft caps and sinks."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(2, 3)) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is None:
        return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(q.dtype), v)
    sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(q.dtype), v)


def causal_mask(
    num_queries: int,
    first_query: int,
    num_keys: int,
    first_key: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[num_queries, num_keys], 0 where the query at `first_query + i` may see the key at `first_key + j`, else -inf."""
    query = torch.arange(first_query, first_query + num_queries, device=device)[:, None]
    key = torch.arange(first_key, first_key + num_keys, device=device)[None, :]
    hidden = key > query
    if window is not None:
        hidden |= query - key >= window
    return torch.zeros(num_queries, num_keys, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
