"""All stages of a model in one process, built as a worker builds its own, one behind the other in every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from corogen.attention.base import forward_context
from corogen.attention.cache import KVCache
from corogen.attention.paged import PagedAttention
from corogen.attention.plan import Planner, RowSpan
from corogen.model import hf
from corogen.model.probing import probe_layers
from corogen.model.shard import Shard
from corogen.model.stages import forward_stage, keep_stage
from corogen.wire.messages import StepInput
from corogen.workers.host_steps import HostSteps
from corogen.workers.pending import Limits, PendingTokens
from corogen.workers.runner import Runner
from tests.model.driver import make_spec

CPU = torch.device("cpu")
LIMITS = Limits(max_slots=16, max_len=256, max_step_tokens=256, last_position=255, vocab_size=512)


def build_stage(path: Path, shard: Shard, **spec: Any) -> Runner:
    """A runner whose model is the stage's, without a cache."""
    runner = Runner(make_spec(path, **spec))
    original = hf.build_model

    def build(config: Any, dtype: torch.dtype) -> Any:
        # the trial in small builds models too
        with mock.patch.object(hf, "build_model", original):
            model = original(config, dtype)
            keep_stage(model, shard)
        return model

    with torch.inference_mode(), mock.patch.object(hf, "build_model", build):
        runner._build(hf.load_config(path, {}), path)
    return runner


class BuiltStage:
    """One stage's model, attention layers, cache and planner, on a CPU."""

    def __init__(self, path: Path, shard: Shard, block_size: int = 16, **spec: Any) -> None:
        runner = build_stage(path, shard, block_size=block_size, **spec)
        self.model, self.warnings, self.dtype = runner._model, runner._warnings, runner._dtype
        self.vocab_size = runner._vocab_size
        with torch.inference_mode():
            self.layers = probe_layers(self.model, hf.load_config(path, {}), CPU)
        self.cache = KVCache(self.layers, 128, block_size, self.dtype, CPU)
        self.planner = Planner(block_size, [f.window for f in self.layers], self.dtype, CPU)


class _ChainSteps(HostSteps):
    """Steps whose forward goes through every stage."""

    def __init__(self, stages: Sequence[BuiltStage]) -> None:
        one = stages[0]
        limits = LIMITS._replace(vocab_size=one.vocab_size)
        super().__init__(one.model, one.cache, one.layers, limits, one.dtype, CPU)
        self._stages = stages

    def _forward(
        self, ids: torch.Tensor, decode: list[RowSpan], prefill: list[RowSpan], logits_at: list[int]
    ) -> torch.Tensor:
        places = np.concatenate([np.arange(s.start, s.start + s.num_tokens) for s in (*decode, *prefill)])
        at = self._tensor(np.array(logits_at or [len(places) - 1], np.int64))
        out = None
        for stage in self._stages:
            context = PagedAttention(stage.cache, stage.planner.plan(decode, prefill))
            with forward_context(context):
                # later stages have no ids
                tokens = ids if out is None else torch.full_like(ids, -1)
                out = forward_stage(stage.model, tokens, out, self._tensor(places), at)
        assert out is not None
        return out


class Chain:
    """For a `Driver`: all stages of a model as one runner."""

    def __init__(self, path: Path, pp: int, partition: tuple[int, ...] = (), **spec: Any) -> None:
        self.stages = [BuiltStage(path, Shard(pp_rank=i, pp=pp, partition=partition), **spec) for i in range(pp)]
        self._steps = _ChainSteps(self.stages)

    @torch.inference_mode()
    def launch(self, step: StepInput) -> PendingTokens:
        """Compute one step."""
        return self._steps.launch(step)
