"""Steps with plain torch operations, planned on the host: what a CPU computes, and a GPU without our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corogen.attention.base import forward_context
from corogen.attention.cache import KVCache
from corogen.attention.paged import PagedAttention
from corogen.attention.plan import Planner, RowSpan
from corogen.attention.probe import LayerFacts
from corogen.model import hf
from corogen.sample.sampler import sample
from corogen.wire.messages import StepInput
from corogen.workers.pending import Limits, PendingTokens
from corogen.workers.rows import SlotTable


class HostSteps:
    """Computes steps with one model over one cache."""

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        layers: Sequence[LayerFacts],
        limits: Limits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model, self._cache, self._limits, self._device = model, cache, limits, device
        self._planner = Planner(cache.block_size, [f.window for f in layers], dtype, device)
        self._slots = SlotTable(limits.max_slots, limits.vocab_size, device)

    def warm_up(self) -> None:
        """One prefill and one decode over block 0, which nobody owns yet, so that no request pays for first calls."""
        count = min(self._cache.block_size - 1, self._limits.max_step_tokens, 8)
        blocks = np.zeros(1, np.int32)
        zeros = torch.zeros(max(count, 1), dtype=torch.long, device=self._device)
        if count:
            self._forward(zeros[:count], [], [RowSpan(0, count, blocks)], [count - 1])
        self._forward(zeros[:1], [RowSpan(count, 1, blocks)], [], [0])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def launch(self, step: StepInput) -> PendingTokens:
        """Compute one step (on a GPU: queue it, without waiting). Raises what the computation raises."""
        slots = self._slots
        slots.apply(step.init, step.blocks)
        slots.count_prefill(step.prefill)
        decode, prefill = slots.decode_spans(step.decode), slots.prefill_spans(step.prefill)
        targets, rows = slots.sample_rows(step)
        logits = self._forward(self._input_ids(step), decode, prefill, _logit_places(step))
        index = self._tensor(np.array(targets, np.int64))
        ids = sample(logits, rows) if rows else index
        slots.advance(step, targets, index, ids)
        return PendingTokens(ids)

    def _input_ids(self, step: StepInput) -> torch.Tensor:
        fresh = [i for row in step.prefill for i in row.token_ids]
        parts = []
        if step.decode:
            parts.append(self._slots.last_tokens[self._tensor(np.array(step.decode, np.int64))])
        if fresh:
            parts.append(self._tensor(np.array(fresh, np.int64)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward(
        self, ids: torch.Tensor, decode: list[RowSpan], prefill: list[RowSpan], logits_at: list[int]
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] at `logits_at`, or of the last token when nothing is to be sampled."""
        plan = self._planner.plan(decode, prefill)
        places = np.concatenate([np.arange(s.start, s.start + s.num_tokens) for s in (*decode, *prefill)])
        # a sequence that ended at the last position may be in one more step, whose token nobody wants
        np.minimum(places, self._limits.last_position, out=places)
        at = self._tensor(np.array(logits_at or [plan.num_tokens - 1], np.int64))
        with forward_context(PagedAttention(self._cache, plan)):
            return hf.forward(self._model, ids, self._tensor(places), at)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


def _logit_places(step: StepInput) -> list[int]:
    """Where in the packed step the rows stand that get a token."""
    places = list(range(len(step.decode)))
    end = len(step.decode)
    for row in step.prefill:
        end += len(row.token_ids)
        if row.sample:
            places.append(end - 1)
    return places
