"""Turns prompts into step messages: the smallest engine that can drive a Runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corogen.wire.messages import PrefillRow, Sampling, SlotBlocks, SlotInit, StepInput, WorkerReady, WorkerSpec
from corogen.workers.runner import Runner

BLOCK_SIZE = 16


def make_spec(path: Path | str, **changes: Any) -> WorkerSpec:
    fields: dict[str, Any] = {
        "model_path": str(path),
        "rank": 0,
        "world_size": 1,
        "sys_path": [],
        "device": "cpu",
        "dtype": "auto",
        "block_size": BLOCK_SIZE,
        "num_blocks": 128,
        "cache_fraction": 0.5,
        "max_slots": 16,
        "max_step_tokens": 256,
        "session_len": None,
        "num_threads": 0,
    }
    return WorkerSpec(**{**fields, **changes})


class Sequence_:
    def __init__(self, slot: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.slot, self.prompt, self.sampling = slot, list(prompt), sampling
        self.tokens = list(prompt)
        self.started, self.num_computed, self.num_blocks = False, 0, 0


class Driver:
    """Runs sequences step by step; `chunk` is the most prompt tokens of one sequence in a step."""

    def __init__(self, runner: Runner, chunk: int = 256) -> None:
        self.runner, self.chunk = runner, chunk
        self.step = 0
        self._next_block = 0
        self._block_size = runner._spec.block_size

    def start(self, slot: int, prompt: Sequence[int], sampling: Sampling = Sampling()) -> Sequence_:
        return Sequence_(slot, prompt, sampling)

    def run_step(self, sequences: Sequence[Sequence_]) -> None:
        init, blocks, decode, prefill, sampled = [], [], [], [], []
        for s in sequences:
            if not s.started:
                init.append(SlotInit(s.slot, len(s.prompt), 0, s.sampling))
                s.started = True
            decoding = s.num_computed >= len(s.prompt)
            count = 1 if decoding else min(self.chunk, len(s.prompt) - s.num_computed)
            fresh = self._blocks(s, s.num_computed + count)
            if fresh:
                blocks.append(SlotBlocks(s.slot, fresh))
            if decoding:
                decode.append(s)
            else:
                done = s.num_computed + count == len(s.prompt)
                ids = s.prompt[s.num_computed : s.num_computed + count]
                prefill.append((s, PrefillRow(s.slot, s.num_computed, ids, done)))
            s.num_computed += count
        sampled = decode + [s for s, row in prefill if row.sample]
        message = StepInput(self.step, 0, init, blocks, [s.slot for s in decode], [row for _, row in prefill])
        self.step += 1
        for s, token in zip(sampled, self.runner.launch(message).wait(), strict=True):
            s.tokens.append(token)

    def _blocks(self, s: Sequence_, length: int) -> list[int]:
        wanted = -(-length // self._block_size) - s.num_blocks
        fresh = list(range(self._next_block, self._next_block + wanted))
        self._next_block += wanted
        s.num_blocks += wanted
        return fresh

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, samplings: Sequence[Sampling] | None = None
    ) -> list[list[int]]:
        """All prompts at once, `new_tokens` each."""
        samplings = samplings or [Sampling()] * len(prompts)
        running = [self.start(i, p, g) for i, (p, g) in enumerate(zip(prompts, samplings, strict=True))]
        all_ = list(running)
        while running:
            self.run_step(running)
            running = [s for s in running if len(s.tokens) < len(s.prompt) + new_tokens]
        return [s.tokens[len(s.prompt) :] for s in all_]


def load(path: Path | str, **changes: Any) -> tuple[Runner, WorkerReady]:
    runner = Runner(make_spec(path, **changes))
    return runner, runner.load()
