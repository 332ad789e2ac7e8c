"""Loads one model and computes steps with it. This is where torch begins; only workers import it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from corogen.attention.cache import KVCache, TokenMajorCache, block_bytes, choose_num_blocks
from corogen.attention.probe import LayerFacts
from corogen.errors import ConfigError, ModelNotFound
from corogen.model import gguf, hf
from corogen.model.activations import stabilise_activations
from corogen.model.devices import kernels_work
from corogen.model.dtypes import choose_dtype
from corogen.model.fuse import fuse_and_pack
from corogen.model.gated import replace_feed_forwards
from corogen.model.layers import fuse_layer_sums
from corogen.model.load import Loader, first_dtype, own_memory
from corogen.model.norm import replace_norms
from corogen.model.probing import probe_layers
from corogen.model.single import use_single_rows
from corogen.wire.messages import StartPhase, StepInput, WorkerReady, WorkerSpec
from corogen.workers.device import choose_device
from corogen.workers.host_steps import HostSteps
from corogen.workers.pending import Limits, PendingTokens

if TYPE_CHECKING:
    from corogen.workers.device_steps import DeviceSteps

Cache = TypeVar("Cache", KVCache, TokenMajorCache)

#: memory kept for computing on a GPU, as a multiple of what the rehearsal took: graphs have a pool of their own
_HEADROOM = 2.0


class Runner:
    """One worker's model, cache and slots. Not thread-safe: `load`, then `launch` step after step."""

    def __init__(self, spec: WorkerSpec, on_phase: Callable[[StartPhase], None] = lambda phase: None) -> None:
        self._spec, self._on_phase = spec, on_phase
        self._device = choose_device(spec.device)
        self._seconds: dict[str, float] = {}
        self._phase_began: tuple[str, float] | None = None
        self._warnings: list[str] = []
        self._steps: HostSteps | DeviceSteps

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
        limit = self._prepare(config)
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
        stored = hf.stored_dtype(config) or (None if self._spec.random_weights else first_dtype(folder))
        self._dtype, note = choose_dtype(self._spec.dtype, stored, self._device)
        self._warnings += note
        with hf.quiet():
            model = hf.build_model(config, self._dtype)
            self._enter("load")
            loader = Loader(model, self._device, self._dtype)
            if self._spec.random_weights:
                loader.fill_randomly()
            else:
                loader.load(folder, self._progress("load"))
            self._warnings += loader.warnings
        self._vocab_size = hf.vocab_size(model)
        fuse_and_pack(model)
        replace_norms(model)
        hf.use_own_rotary(model)
        replace_feed_forwards(model)
        fuse_layer_sums(model)
        own_memory(model, self._device)
        use_single_rows(model, self._device)
        stabilise_activations(model)
        self._model = model

    def _prepare(self, config: Any) -> int:
        """Find the attention layers, reserve their cache and run once; returns how many positions there are."""
        spec, places = self._spec, hf.positions(config)
        self._warnings += places.warnings
        layers = probe_layers(self._model, config, self._device)
        limits = Limits(
            spec.max_slots,
            min(spec.session_len or places.limit, places.limit),
            spec.max_step_tokens,
            places.limit - 1,
            self._vocab_size,
        )
        if kernels_work(self._device):
            self._steps = self._device_steps(layers, limits)
        else:
            self._steps = self._host_steps(layers, limits)
        return places.limit

    def _host_steps(self, layers: list[LayerFacts], limits: Limits) -> HostSteps:
        cache = self._cache(KVCache, layers, limits)
        steps = HostSteps(self._model, cache, layers, limits, self._dtype, self._device)
        self._enter("warmup")
        steps.warm_up()
        return steps

    def _device_steps(self, layers: list[LayerFacts], limits: Limits) -> DeviceSteps:
        """A rehearsal over one block shows how much memory computing takes; the rest is the cache's."""
        from corogen.workers.device_steps import DeviceSteps

        size = self._spec.block_size
        self._enter("warmup")
        steps = DeviceSteps(self._model, layers, limits, size, self._device)
        steps.use_cache(TokenMajorCache(layers, 1, size, self._dtype, self._device))
        reserve = int(_HEADROOM * steps.rehearse())
        torch.cuda.empty_cache()
        self._enter("cache")
        steps.use_cache(self._cache(TokenMajorCache, layers, limits, reserve))
        if not self._spec.eager_mode:
            self._enter("capture")
            self._warnings += steps.capture()
        return steps

    def _cache(self, kind: type[Cache], layers: list[LayerFacts], limits: Limits, reserve: int = 0) -> Cache:
        spec = self._spec
        count = spec.num_blocks or choose_num_blocks(
            block_bytes(layers, spec.block_size, self._dtype),
            spec.block_size,
            self._device,
            spec.cache_fraction,
            spec.max_slots,
            limits.max_len,
            reserve,
        )
        self._num_blocks = count
        try:
            return kind(layers, count, spec.block_size, self._dtype, self._device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"{count} KV blocks do not fit into memory: {error}") from error

    def _ready(self, limit: int) -> WorkerReady:
        return WorkerReady(
            num_blocks=self._num_blocks,
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
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
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
        return self._steps.launch(step)
