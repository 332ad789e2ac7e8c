"""Steps on a GPU: state stays there, kernels follow block tables, and pure decode steps are CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corogen.attention.base import forward_context
from corogen.attention.cache import TokenMajorCache
from corogen.attention.probe import LayerFacts
from corogen.attention.triton_paged import DeviceBatch, TritonAttention
from corogen.attention.triton_prefill import tokens_per_tile
from corogen.model import hf
from corogen.sample.sampler import sample
from corogen.sample.triton_argmax import choose_best
from corogen.wire.messages import PrefillRow, Sampling, SlotBlocks, SlotInit, StepInput
from corogen.workers.device_kernels import apply_changes, prepare, remember
from corogen.workers.graphs import GraphLadder, Outcome, ladder
from corogen.workers.pending import Limits, PendingTokens
from corogen.workers.resident import ResidentSlots


class DeviceSteps:
    """Computes steps with one model on one GPU. `use_cache` comes first, then optionally `capture`."""

    def __init__(
        self, model: Any, layers: Sequence[LayerFacts], limits: Limits, block_size: int, device: torch.device
    ) -> None:
        self._model, self._limits, self._block_size, self._device = model, limits, block_size, device
        self._turns = all(f.turned_last for f in layers)
        self._tile_tokens = tokens_per_tile(max(f.group for f in layers))
        self._slots = ResidentSlots(limits.max_slots, limits.max_len, block_size, limits.vocab_size, device)
        self._graphs = GraphLadder(device)
        #: what graphs read: slots of the decode rows, -1 behind them
        self._rows = torch.full((limits.max_slots,), -1, dtype=torch.int32, device=device)
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
        self._decode(self._limits.max_slots)
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
        """Record decode steps of a ladder of batch sizes. Returns warnings: not every model can be captured."""
        try:
            self._graphs.capture(ladder(self._limits.max_slots), self._decode)
        except RuntimeError as error:
            self._graphs = GraphLadder(self._device)
            torch.cuda.synchronize(self._device)
            return [f"no CUDA graphs, so steps are slow: this model can not be captured ({error})"]
        return []

    # --- steps -------------------------------------------------------------------------------------------------------

    def launch(self, step: StepInput) -> PendingTokens:
        """Queue one step without waiting. Raises what the computation raises."""
        slots = self._slots
        slots.apply(step.init, step.blocks)
        decode = np.array(step.decode, np.int32)
        slots.require(decode)
        slots.count_prefill(step.prefill)
        targets = np.array([*step.decode, *(r.slot for r in step.prefill if r.sample)], np.int32)
        ends = slots.ends(decode, step.prefill)
        size = None if step.prefill else self._graphs.fit(len(decode))
        outcome = self._mixed(decode, step.prefill, targets) if size is None else self._replay(size, decode)
        ids = self.choose(outcome, targets, ends)
        slots.advance(decode)
        return PendingTokens(ids)

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
        self._rows[:size].copy_(_pinned(rows), non_blocking=True)
        return self._graphs.replay(size)

    def _decode(self, size: int) -> Outcome:
        """One token for each of the first `size` rows of `_rows`."""
        rows = self._rows[:size]
        logits = self._forward(rows, None, size, None, torch.arange(size, device=self._device))
        ids = self._ids[:size]
        choose_best(logits, rows, self._slots.last_tokens, ids)
        return Outcome(logits, ids)

    def _mixed(self, decode: np.ndarray, prefill: Sequence[PrefillRow], targets: np.ndarray) -> Outcome:
        """Any step, without a graph."""
        for row in prefill:
            self._slots.set_length(row.slot, row.start + len(row.token_ids))
        self._send_changes()
        tokens, tiles, at = _packed(decode, prefill, self._tile_tokens)
        at = at if len(at) else np.array([tokens.shape[1] - 1], np.int32)
        parts = self._upload(np.concatenate([tokens.ravel(), tiles.ravel(), at, targets]))
        sizes = [tokens.size, tiles.size, len(at), len(targets)]
        packed, tile, index, slots = torch.split(parts, sizes)
        packed = packed.view(3, -1)
        logits = self._forward(packed[0], packed[1:], len(decode), tile.view(-1, 4), index.long())
        ids = self._ids[: len(logits)]
        if len(targets):
            choose_best(logits, slots, self._slots.last_tokens, ids)
        return Outcome(logits, ids)

    def _forward(
        self,
        token_slots: torch.Tensor,
        fresh: torch.Tensor | None,
        num_rows: int,
        tiles: torch.Tensor | None,
        at: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [len(at), vocabulary]; the first `num_rows` tokens are decode rows, see `prepare`."""
        slots, count = self._slots, token_slots.shape[0]
        ids, positions = torch.empty(2, count, dtype=torch.long, device=self._device)
        places, lengths = torch.empty(2, count, dtype=torch.int32, device=self._device)
        lengths, limit = lengths[:num_rows], self._limits.last_position
        state = slots.tables, slots.lengths, slots.last_tokens
        prepare(token_slots, fresh, *state, self._block_size, limit, ids, positions, places, lengths)
        rows = token_slots[:num_rows]
        batch = DeviceBatch(
            slots.tables, places, rows, lengths, tiles if tiles is not None and len(tiles) else None, self._tile_tokens
        )
        with forward_context(TritonAttention(self._cache, batch, self._turns)):
            return hf.forward(self._model, ids, positions, at)

    def _send_changes(self) -> None:
        changes = self._slots.take_changes()
        if changes is not None:
            apply_changes(self._slots.state, self._upload(changes.ravel()), changes.shape[1])

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return _pinned(array).to(self._device, non_blocking=True)


def _pinned(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory()


def _packed(
    decode: np.ndarray, prefill: Sequence[PrefillRow], tile_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, positions and ids of all tokens [3, T], tiles [n, 4], and where the rows stand that get a token."""
    columns, tiles, at = [np.stack([decode, np.full_like(decode, -1), np.zeros_like(decode)])], [], []
    first = len(decode)
    for row in prefill:
        count = len(row.token_ids)
        columns.append(np.stack([np.full(count, row.slot), row.start + np.arange(count), row.token_ids]))
        begin = np.arange(0, count, tile_tokens)
        tile = np.stack(
            [np.full_like(begin, row.slot), first + begin, np.minimum(count - begin, tile_tokens), row.start + begin]
        )
        tiles.append(tile.T)
        first += count
        if row.sample:
            at.append(first - 1)
    tile_rows = np.concatenate(tiles) if tiles else np.zeros((0, 4), np.int64)
    places = np.array([*range(len(decode)), *at], np.int32)
    return np.concatenate(columns, 1).astype(np.int32), tile_rows.astype(np.int32), places
