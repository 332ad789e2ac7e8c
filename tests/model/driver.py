"""Turns prompts into step messages: the smallest engine that can drive a Runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from corogen.sample import sampler
from corogen.wire.messages import PrefillRow, Sampling, SlotBlocks, SlotInit, StepInput, WorkerReady, WorkerSpec
from corogen.workers import host_steps
from corogen.workers.runner import Runner

GREEDY = Sampling()


def make_spec(path: Path | str, **changes: Any) -> WorkerSpec:
    fields: dict[str, Any] = {
        "model_path": str(path),
        "rank": 0,
        "world_size": 1,
        "sys_path": [],
        "device": "cpu",
        "dtype": "auto",
        "block_size": 16,
        "num_blocks": 128,
        "cache_fraction": 0.5,
        "max_slots": 16,
        "max_step_tokens": 256,
        "session_len": None,
        "num_threads": 0,
    }
    return WorkerSpec(**{**fields, **changes})


def load(path: Path | str, **changes: Any) -> tuple[Runner, WorkerReady]:
    runner = Runner(make_spec(path, **changes))
    return runner, runner.load()


class Sequence_:  # noqa: N801 (the short name is taken)
    """One request."""

    def __init__(self, slot: int, prompt: Sequence[int], sampling: Sampling = GREEDY) -> None:
        self.slot, self.prompt, self.sampling = slot, list(prompt), sampling
        self.tokens = list(prompt)
        self.prompt_len = len(self.prompt)
        self.started, self.num_computed, self.num_blocks = False, 0, 0
        #: [vocabulary] for every new token
        self.logits: list[torch.Tensor] = []

    @property
    def new(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def restart(self) -> None:
        """As after a preemption: everything is computed again, in new blocks."""
        self.prompt = list(self.tokens)
        self.started, self.num_computed, self.num_blocks = False, 0, 0


class Driver:
    """Runs sequences step by step; `chunk` is the most prompt tokens of one sequence in a step."""

    def __init__(self, runner: Runner, chunk: int = 256, block_size: int = 16) -> None:
        self.runner, self.chunk, self._block_size = runner, chunk, block_size
        self._step = 0
        # not in order and not neighbours, as in a pool that has been used
        self._free = [b for start in (1, 0) for b in range(start, 128, 2)]

    def run_step(self, sequences: Sequence[Sequence_]) -> None:
        init, blocks, decode, prefill = [], [], [], []
        for s in sequences:
            if not s.started:
                init.append(SlotInit(s.slot, s.prompt_len, 0, s.sampling))
                s.started = True
            decoding = s.num_computed >= len(s.prompt)
            count = 1 if decoding else min(self.chunk, len(s.prompt) - s.num_computed)
            if fresh := self._take(s, s.num_computed + count):
                blocks.append(SlotBlocks(s.slot, fresh))
            if decoding:
                decode.append(s)
            else:
                ids = s.prompt[s.num_computed : s.num_computed + count]
                done = s.num_computed + count == len(s.prompt)
                prefill.append((s, PrefillRow(s.slot, s.num_computed, ids, done)))
            s.num_computed += count
        message = StepInput(self._step, 0, init, blocks, [s.slot for s in decode], [row for _, row in prefill])
        self._step += 1
        self._launch(message, decode + [s for s, row in prefill if row.sample])

    def _launch(self, message: StepInput, receivers: list[Sequence_]) -> None:
        seen: dict[int, torch.Tensor] = {}
        with self._spying(seen, [s.slot for s in receivers]):
            tokens = self.runner.launch(message).wait()
        for s, token in zip(receivers, tokens, strict=True):
            s.tokens.append(token)
            s.logits.append(seen[s.slot])

    def _spying(self, seen: dict[int, torch.Tensor], slots: list[int]) -> Any:
        """Whatever tokens are chosen from inside the block is added to `seen`, by slot."""
        steps: Any = self.runner._steps

        def spy(logits: torch.Tensor, rows: Sequence[sampler.SampleRow]) -> torch.Tensor:
            seen.update(zip(slots, logits.float().cpu(), strict=True))
            return sampler.sample(logits, rows)

        def choose(outcome: Any, targets: Any, ends: Any) -> torch.Tensor:
            seen.update(zip(targets.tolist(), outcome.logits[: len(targets)].float().cpu(), strict=True))
            return type(steps).choose(steps, outcome, targets, ends)

        if hasattr(steps, "choose"):
            return mock.patch.object(steps, "choose", choose)
        return mock.patch.object(host_steps, "sample", spy)

    def _take(self, s: Sequence_, length: int) -> list[int]:
        wanted = -(-length // self._block_size) - s.num_blocks
        s.num_blocks += wanted
        return [self._free.pop(0) for _ in range(wanted)]

    def finish(self, sequences: Sequence[Sequence_], new_tokens: int) -> None:
        running = [s for s in sequences if len(s.new) < new_tokens]
        while running:
            self.run_step(running)
            running = [s for s in running if len(s.new) < new_tokens]

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, samplings: Sequence[Sampling] | None = None
    ) -> list[Sequence_]:
        """All prompts at once, `new_tokens` each."""
        settings = samplings or [GREEDY] * len(prompts)
        sequences = [Sequence_(i, p, g) for i, (p, g) in enumerate(zip(prompts, settings, strict=True))]
        self.finish(sequences, new_tokens)
        return sequences
