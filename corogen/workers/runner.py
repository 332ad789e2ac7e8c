"""Loads one model and computes steps with it. This is where torch begins; only workers import it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corogen.attention.base import forward_context
from corogen.attention.cache import KVCache, block_bytes, choose_num_blocks
from corogen.attention.paged import PagedAttention
from corogen.attention.plan import Planner, RowSpan
from corogen.errors import ConfigError, ModelNotFound
from corogen.model import gguf, hf
from corogen.model.dtypes import choose_dtype
from corogen.model.fuse import fuse_and_pack
from corogen.model.load import Loader, first_dtype, own_memory
from corogen.model.norm import replace_norms
from corogen.model.probing import probe_layers
from corogen.sample.sampler import sample
from corogen.wire.messages import StartPhase, StepInput, WorkerReady, WorkerSpec
from corogen.workers.device import choose_device
from corogen.workers.rows import SlotTable


class PendingTokens:
    """The ids of a launched step, on their way to the host."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._event: Any = None
        self._ids = ids
        if ids.is_cuda:
            self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._ids.copy_(ids, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[int]:
        """Block until the ids are on the host; in the order that `StepInput` defines. Safe from another thread."""
        if self._event is not None:
            self._event.synchronize()
        ids: list[int] = self._ids.tolist()
        return ids


class Runner:
    """One worker's model, cache and slots. Not thread-safe: `load`, then `launch` step after step."""

    def __init__(self, spec: WorkerSpec, on_phase: Callable[[StartPhase], None] = lambda phase: None) -> None:
        self._spec, self._on_phase = spec, on_phase
        self._device = choose_device(spec.device)
        self._seconds: dict[str, float] = {}
        self._phase_began: tuple[str, float] | None = None
        self._warnings: list[str] = []

    # --- start-up ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self) -> WorkerReady:
        """Build and fill the model, reserve the cache, and run once.

        Raises:
            ModelError, ConfigError: what is wrong and what to do about it.
        """
        if self._spec.num_threads > 0:
            torch.set_num_threads(self._spec.num_threads)
        folder = self._folder()
        self._enter("build")
        config = hf.load_config(folder, self._spec.hf_overrides)
        hf.check_layers(config)
        self._build(config, folder)
        self._enter("cache")
        limit = self._reserve(config)
        self._enter("warmup")
        self._warm_up()
        self._leave()
        return self._ready(limit)

    def _folder(self) -> Path:
        path = Path(self._spec.model_path)
        if path.suffix.lower() != ".gguf":
            return path
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path}")
        folder = gguf.converted_folder(path)
        if not folder.is_dir():
            self._enter("convert")
            gguf.convert(path, folder, self._progress("convert"))
        return folder

    def _build(self, config: Any, folder: Path) -> None:
        self._dtype, note = choose_dtype(self._spec.dtype, hf.stored_dtype(config) or first_dtype(folder), self._device)
        self._warnings += note
        with hf.quiet():
            model = hf.build_model(config, self._dtype)
            self._enter("load")
            loader = Loader(model, self._device, self._dtype)
            loader.load(folder, self._progress("load"))
            self._warnings += loader.warnings
        self._vocab_size = hf.vocab_size(model)
        fuse_and_pack(model)
        replace_norms(model)
        hf.use_own_rotary(model)
        own_memory(model, self._device)
        self._model = model

    def _reserve(self, config: Any) -> int:
        """Find the attention layers and reserve their cache; returns how many positions the model can address."""
        spec, places = self._spec, hf.positions(config)
        self._warnings += places.warnings
        layers = probe_layers(self._model, config, self._device)
        max_len = min(spec.session_len or places.limit, places.limit)
        count = spec.num_blocks or choose_num_blocks(
            block_bytes(layers, spec.block_size, self._dtype),
            spec.block_size,
            self._device,
            spec.cache_fraction,
            spec.max_slots,
            max_len,
        )
        try:
            self._cache = KVCache(layers, count, spec.block_size, self._dtype, self._device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"{count} KV blocks do not fit into memory: {error}") from error
        self._last_position = places.limit - 1
        self._planner = Planner(spec.block_size, [f.window for f in layers], self._dtype, self._device)
        self._slots = SlotTable(spec.max_slots, self._vocab_size, self._device)
        return places.limit

    def _warm_up(self) -> None:
        """One prefill and one decode over block 0, which nobody owns yet, so that no request pays for first calls."""
        count = min(self._spec.block_size - 1, self._spec.max_step_tokens, 8)
        blocks = np.zeros(1, np.int32)
        zeros = torch.zeros(max(count, 1), dtype=torch.long, device=self._device)
        if count:
            self._forward(zeros[:count], [], [RowSpan(0, count, blocks)], [count - 1])
        self._forward(zeros[:1], [RowSpan(count, 1, blocks)], [], [0])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _ready(self, limit: int) -> WorkerReady:
        return WorkerReady(
            num_blocks=self._cache.num_blocks,
            max_positions=limit,
            vocab_size=self._vocab_size,
            dtype=str(self._dtype).removeprefix("torch."),
            device=str(self._device),
            phases=self._seconds,
            warnings=self._warnings,
        )

    def _enter(self, name: str) -> None:
        self._leave()
        self._phase_began = (name, time.perf_counter())
        self._on_phase(StartPhase(name))

    def _leave(self) -> None:
        if self._phase_began is not None:
            name, began = self._phase_began
            self._seconds[name] = time.perf_counter() - began
            self._phase_began = None

    def _progress(self, name: str) -> Callable[[int, int], None]:
        """Report in whole percents, so that a file of thousands of tensors does not send thousands of messages."""
        last = -1

        def report(done: int, total: int) -> None:
            nonlocal last
            percent = 100 * done // max(total, 1)
            if percent != last:
                last = percent
                self._on_phase(StartPhase(name, done, total))

        return report

    # --- steps -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
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
        np.minimum(places, self._last_position, out=places)
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
