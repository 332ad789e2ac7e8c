"""Steps on a GPU: state stays there, kernels follow block tables, and pure decode steps are CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corogen.attention.base import forward_context
from corogen.attention.cache import TokenMajorCache
from corogen.attention.probe import LayerFacts
from corogen.attention.triton_decode import max_shares, share_out
from corogen.attention.triton_paged import DeviceBatch, TritonAttention
from corogen.attention.triton_prefill import tokens_per_tile
from corogen.model import hf
from corogen.model.head_norms import leave_norms_to_attention
from corogen.sample.sampler import SampleRow, sample
from corogen.sample.triton_argmax import choose_best
from corogen.wire.messages import PrefillRow, Sampling, SlotBlocks, SlotInit, StepInput
from corogen.workers.device_kernels import apply_changes, prepare, remember
from corogen.workers.graphs import MAX_CAPTURED_TOKENS, GraphLadder, GraphPool, Outcome, batch_sizes, token_counts
from corogen.workers.packing import Parts, Shape, arrays_of, pack, shape_of, unpack
from corogen.workers.pending import Limits, PendingTokens
from corogen.workers.resident import ResidentSlots

#: sampling that takes every path of the sampler
_DEMANDING = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)


class DeviceSteps:
    """Computes steps with one model on one GPU. `use_cache` comes first, then optionally `capture`."""

    def __init__(
        self, model: Any, layers: Sequence[LayerFacts], limits: Limits, block_size: int, device: torch.device
    ) -> None:
        self._model, self._limits, self._block_size, self._device = model, limits, block_size, device
        self._turns = all(f.turned_last for f in layers)
        if self._turns:
            leave_norms_to_attention(model, device)
        self._tile_tokens = tokens_per_tile(max(f.group for f in layers))
        self._slots = ResidentSlots(limits.max_slots, limits.max_len, block_size, limits.vocab_size, device)
        self._graphs, self._prompt_graphs = GraphLadder(), GraphLadder()
        #: what graphs read: slots of the decode rows, -1 behind them
        self._rows = torch.full((limits.max_slots,), -1, dtype=torch.int32, device=device)
        self._host_rows = np.full(limits.max_slots, -1, np.int32)
        self._inbox = torch.full((self._shape(MAX_CAPTURED_TOKENS).total,), -1, dtype=torch.int32, device=device)
        self._kv_heads = max(f.kv_heads for f in layers)
        self._arrived = torch.zeros(limits.max_slots * self._kv_heads, dtype=torch.int32, device=device)
        self._ids = torch.zeros(limits.max_slots, dtype=torch.long, device=device)

    # --- start-up ----------------------------------------------------------------------------------------------------

    def use_cache(self, cache: TokenMajorCache) -> None:
        """Compute over this cache from now on. Slots begin anew; graphs of another cache must not exist."""
        self._cache = cache
        self._slots.clear()

    def rehearse(self) -> int:
        """The largest prompts and the largest decode batch over a cache of one block, whose contents do not matter.

        Returns how many bytes the computation took at most, beyond what was there before.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self.launch(self._largest_step()).wait()
        outcome = self._decode(self._limits.max_slots)
        sample(outcome.logits, [SampleRow(_DEMANDING, 0)] * len(outcome.logits))
        torch.cuda.synchronize(self._device)
        self._slots.clear()
        return torch.cuda.max_memory_allocated(self._device) - before

    def _largest_step(self) -> StepInput:
        limits, left = self._limits, self._limits.max_step_tokens
        init, blocks, rows = [], [], []
        for slot in range(limits.max_slots):
            count = min(left, limits.max_len)
            if not count:
                break
            left -= count
            init.append(SlotInit(slot, count, 0, Sampling()))
            blocks.append(SlotBlocks(slot, [0] * -(-count // self._block_size)))
            rows.append(PrefillRow(slot, 0, [0] * count, True))
        return StepInput(0, 0, init, blocks, [], rows)

    def capture(self) -> list[str]:
        """Record decode steps and small steps with prompts at a ladder of sizes each.

        Returns warnings: not every model can be captured.
        """
        pool, limits = GraphPool(self._device), self._limits
        decode, prompts = GraphLadder(), GraphLadder()
        try:
            prompts.capture(token_counts(limits.max_step_tokens), pool, self._captured_tokens)
            decode.capture(batch_sizes(limits.max_slots), pool, self._decode)
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)
            return [f"no CUDA graphs, so steps are slow: this model can not be captured ({error})"]
        self._graphs, self._prompt_graphs = decode, prompts
        return []

    # --- steps -------------------------------------------------------------------------------------------------------

    def launch(self, step: StepInput) -> PendingTokens:
        """Queue one step without waiting. Raises what the computation raises."""
        slots = self._slots
        slots.apply(step.init, step.blocks)
        decode = np.array(step.decode, np.int32)
        slots.require(decode)
        slots.count_prefill(step.prefill)
        order = slots.longest_first(decode)
        decode = decode[order]
        targets = np.array([*decode, *(r.slot for r in step.prefill if r.sample)], np.int32)
        ends = slots.ends(decode, step.prefill)
        size = None if step.prefill else self._graphs.fit(len(decode))
        outcome = self._with_prompts(decode, step.prefill, targets) if size is None else self._replay(size, decode)
        ids = self.choose(outcome, targets, ends)
        slots.advance(decode)
        return PendingTokens(ids, order)

    def choose(self, outcome: Outcome, targets: np.ndarray, ends: np.ndarray) -> torch.Tensor:
        """The next tokens of the slots `targets`, whose positions are `ends`."""
        slots, count = self._slots, len(targets)
        ids = outcome.ids[:count]
        if count and not slots.all_plain(targets, ends):
            ids = sample(outcome.logits[:count], slots.sample_rows(targets, ends))
            remember(slots.last_tokens, self._upload(targets), ids)
            slots.count_sampled(targets, ids)
        return ids

    def _replay(self, size: int, decode: np.ndarray) -> Outcome:
        self._send_changes()
        rows = np.full(size, -1, np.int32)
        rows[: len(decode)] = decode
        if not np.array_equal(self._host_rows[:size], rows):
            self._host_rows[:size] = rows
            self._rows[:size].copy_(_pinned(rows), non_blocking=True)
        return self._graphs.replay(size)

    def _decode(self, size: int) -> Outcome:
        """One token for each of the first `size` rows of `_rows`."""
        rows = self._rows[:size]
        logits = self._forward(rows, None, size, None, torch.arange(size, device=self._device))
        ids = self._ids[:size]
        choose_best(logits, rows, self._slots.last_tokens, ids)
        return Outcome(logits, ids)

    def _with_prompts(self, decode: np.ndarray, prefill: Sequence[PrefillRow], targets: np.ndarray) -> Outcome:
        for row in prefill:
            self._slots.set_length(row.slot, row.start + len(row.token_ids))
        self._send_changes()
        arrays = arrays_of(decode, prefill, self._tile_tokens, targets)
        size = self._prompt_graphs.fit(len(arrays.slots))
        if size is not None and self._shape(size).fits(arrays):
            packed = pack(arrays, self._shape(size))
            self._inbox[: len(packed)].copy_(_pinned(packed), non_blocking=True)
            return self._prompt_graphs.replay(size)
        shape = shape_of(arrays)
        return self._tokens(unpack(self._upload(pack(arrays, shape)), shape), len(decode), bool(prefill))

    def _shape(self, tokens: int) -> Shape:
        """Shape of a captured step: room for 64 prompts' last tiles."""
        return Shape(tokens, tokens // self._tile_tokens + min(64, tokens), min(tokens, self._limits.max_slots))

    def _captured_tokens(self, size: int) -> Outcome:
        """What `_inbox` holds in the shape of `size` tokens."""
        shape = self._shape(size)
        return self._tokens(unpack(self._inbox, shape), shape.rows, True)

    def _tokens(self, parts: Parts, num_rows: int, prompts: bool) -> Outcome:
        """Any step; its decode rows are among the first `num_rows` tokens."""
        fresh = parts.positions, parts.ids
        logits = self._forward(parts.slots, fresh, num_rows, parts.tiles if prompts else None, parts.at.long())
        ids = self._ids[: len(logits)]
        choose_best(logits, parts.targets, self._slots.last_tokens, ids)
        return Outcome(logits, ids)

    def _forward(
        self,
        token_slots: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor] | None,
        num_rows: int,
        tiles: torch.Tensor | None,
        at: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [len(at), vocabulary]; decode rows are among the first `num_rows` tokens, see `prepare`."""
        slots, count = self._slots, token_slots.shape[0]
        # each a tensor of its own: kernels are compiled anew for pointers that are aligned otherwise
        ids, positions = (torch.empty(count, dtype=torch.long, device=self._device) for _ in range(2))
        places, lengths = (torch.empty(n, dtype=torch.int32, device=self._device) for n in (count, num_rows))
        state, limit = (slots.tables, slots.lengths, slots.last_tokens), self._limits.last_position
        prepare(token_slots, fresh, *state, self._block_size, limit, ids, positions, places, lengths)
        shares = self._shares(token_slots[:num_rows], lengths)
        batch = DeviceBatch(slots.tables, places, shares, tiles, self._tile_tokens, self._arrived)
        with forward_context(TritonAttention(self._cache, batch, self._turns)):
            return hf.forward(self._model, ids, positions, at)

    def _shares(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Of the decode rows' keys, see `share_out`."""
        count = max_shares(len(rows), self._kv_heads) if len(rows) else 0
        shares = torch.empty((count, 8), dtype=torch.int32, device=self._device)
        if count:
            share_out(rows, lengths, shares, self._kv_heads)
        return shares

    def _send_changes(self) -> None:
        changes = self._slots.take_changes()
        if changes is not None:
            apply_changes(self._slots.state, self._upload(changes.ravel()), changes.shape[1])

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return _pinned(array).to(self._device, non_blocking=True)


def _pinned(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory()
