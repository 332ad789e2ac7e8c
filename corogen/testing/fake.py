"""An executor without a model: scripted tokens, scripted time, scripted faults."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from corogen.errors import CorogenError, WorkerDied
from corogen.wire.messages import StartPhase, StepError, StepInput, StepOutput, StepSkipped, WorkerReady, WorkerSpec
from corogen.workers.executor import StepResult

#: answers by prompt: `script(prompt_ids)` gives the ids of the answer; past its end the last id repeats
Script = Callable[[list[int]], Sequence[int]]


class _Slot:
    """One sequence: its tokens as the device has them, and the answer that its prompt gets."""

    __slots__ = ("answer", "num_blocks", "prompt_len", "tokens")

    def __init__(self, prompt_len: int) -> None:
        self.prompt_len = prompt_len
        self.tokens: list[int] = []
        self.num_blocks = 0
        self.answer: Sequence[int] = ()

    def next(self) -> int:
        place = len(self.tokens) - self.prompt_len
        token = self.answer[place] if place < len(self.answer) else self.answer[-1]
        self.tokens.append(token)
        return token


class FakeExecutor:
    """Answers steps from a script, in order, on the engine's loop.

    Args:
        script: ids of the answer to a prompt. A constant answer: `lambda prompt: [5, 6, 7]`.
        step_time_s: seconds a step; 0 answers at the loop's next turn. Steps follow each other without a gap, as on
            a device, and no more precisely than the loop's timers allow.
        num_blocks: size of the pretended cache.
        max_positions, vocab_size: of the pretended model.
        fail_at: step number -> exception that the step raises, or the worker dies of when it is a WorkerDied.

    Every step's message is kept in `steps` when `record` is on. Blocks keep their contents as on a device: a prompt
    whose beginning is cached is read from the blocks that the scheduler named, right or wrong.
    """

    on_result: Callable[[StepResult], None]
    on_failure: Callable[[CorogenError], None]

    def __init__(
        self,
        script: Script = lambda prompt: [5],
        *,
        step_time_s: float = 0.0,
        num_blocks: int = 1024,
        max_positions: int = 4096,
        vocab_size: int = 512,
        fail_at: dict[int, Exception] | None = None,
        record: bool = False,
    ) -> None:
        self.script, self.step_time_s = script, step_time_s
        self.num_blocks, self.max_positions, self.vocab_size = num_blocks, max_positions, vocab_size
        self.fail_at = dict(fail_at or {})
        self.steps: list[StepInput] = []
        self._record = record
        self._slots: dict[int, _Slot] = {}
        self._blocks: dict[int, tuple[_Slot, int]] = {}  # who wrote it last, and which of its blocks it is
        self._block_size = 1
        self._queue: deque[tuple[StepInput, float]] = deque()  # with the moment of its submission
        self._failed_epoch = -1
        self._due = 0.0
        self._timer: asyncio.Handle | None = None
        self._dead = False

    async def start(self, spec: WorkerSpec, on_phase: Callable[[StartPhase], None]) -> WorkerReady:
        """Ready at once, with nothing in the cache; also again, after a scripted death."""
        self._dead, self._failed_epoch = False, -1
        self._slots.clear()
        self._blocks.clear()
        self._queue.clear()
        on_phase(StartPhase("load"))
        self._block_size = spec.block_size
        blocks = spec.num_blocks or self.num_blocks
        return WorkerReady(blocks, self.max_positions, self.vocab_size, "float32", "cpu", {"load": 0.0})

    def submit(self, step: StepInput) -> None:
        """Queue a step behind those in flight."""
        if self._record:
            self.steps.append(step)
        self._queue.append((step, time.monotonic()))
        if len(self._queue) == 1 and not self._dead:
            self._arm()

    async def close(self) -> None:
        """Nothing is answered any more."""
        self._dead = True
        if self._timer is not None:
            self._timer.cancel()

    def die(self, exit_code: int = -9) -> None:
        """The worker ends at this moment, on the engine's loop; nothing while it is down already."""
        if not self._dead:
            self._dead = True
            if self._timer is not None:
                self._timer.cancel()
            self.on_failure(WorkerDied(0, exit_code))

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        if self.step_time_s:
            # as a device: it begins when the step before is done, however late the loop learns of that
            self._due = max(self._due, self._queue[0][1]) + self.step_time_s
            # not the loop's own clock: uvloop's stands still for as long as the thread waits for the interpreter's lock
            self._timer = loop.call_later(max(0.0, self._due - time.monotonic()), self._finish_step)
        else:
            self._timer = loop.call_soon(self._finish_step)

    def _finish_step(self) -> None:
        step, _ = self._queue.popleft()
        fault = self.fail_at.pop(step.step, None)
        if isinstance(fault, WorkerDied):
            self._dead = True
            self.on_failure(fault)
            return
        if self._queue:
            self._arm()
        self.on_result(self._answer(step, fault))

    def _answer(self, step: StepInput, fault: Exception | None) -> StepResult:
        if step.epoch <= self._failed_epoch:
            return StepSkipped(step.step, step.epoch)
        if fault is not None:
            self._failed_epoch = step.epoch
            return StepError(step.step, step.epoch, f"{type(fault).__name__}: {fault}", type(fault).__name__)
        return StepOutput(step.step, step.epoch, self.compute(step))

    def compute(self, step: StepInput) -> list[int]:
        """The ids of one step, at once."""
        self._assign(step)
        out = [self._slots[slot].next() for slot in step.decode]
        for row in step.prefill:
            slot = self._slots[row.slot]
            del slot.tokens[row.start :]
            slot.tokens += row.token_ids
            if row.sample:
                slot.answer = self.script(slot.tokens[: slot.prompt_len])
                out.append(slot.next())
        return out

    def _assign(self, step: StepInput) -> None:
        cached = {init.slot: init.num_cached // self._block_size for init in step.init}
        for init in step.init:
            self._slots[init.slot] = _Slot(init.prompt_len)
        for row in step.blocks:
            slot = self._slots[row.slot]
            for block in row.blocks:
                if slot.num_blocks < cached.get(row.slot, 0):
                    slot.tokens += self._contents(block)
                self._blocks[block] = (slot, slot.num_blocks)
                slot.num_blocks += 1

    def _contents(self, block: int) -> list[int]:
        writer, index = self._blocks[block]
        return writer.tokens[index * self._block_size : (index + 1) * self._block_size]
