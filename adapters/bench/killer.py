"""Kills the workers of an engine from time to time, and times how they come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from corogen.errors import CorogenError
from corogen.testing import FakeExecutor
from corogen.wire.messages import StartPhase, StepInput, StepOutput, WorkerReady, WorkerSpec
from corogen.workers.executor import Executor, StepResult


@dataclass
class Death:
    """One kill and what followed, in seconds of one clock. None: not before the next kill, or not at all."""

    killed_at: float
    #: whether requests were under way
    with_work: bool
    noticed_at: float | None = None
    ready_at: float | None = None
    #: when the first token of the new workers was there
    resumed_at: float | None = None
    #: steps and tokens of the workers that were killed
    steps: int = 0
    tokens: int = 0

    def figures(self) -> dict[str, float] | None:
        """Seconds from the kill to the first new token, and its parts; None if there was nothing to resume."""
        if self.ready_at is None or self.resumed_at is None or not self.with_work:
            return None
        return {
            "total": self.resumed_at - self.killed_at,
            "restart": self.ready_at - self.killed_at,
            "prefill": self.resumed_at - self.ready_at,
        }


class Killer:
    """An executor around another one that kills its workers a fixed time after they were last ready.

    While there is work, not before they have sampled a token either: on a machine so busy that this takes longer,
    requests would seem to kill their workers. So restarts never starve the requests. Made before the engine, and passed
    to it as its executor.
    """

    on_result: Callable[[StepResult], None]
    on_failure: Callable[[CorogenError], None]

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        inner.on_result, inner.on_failure = self._answered, self._failed
        self._every_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._up = asyncio.Event()
        self._busy: Callable[[], bool] = lambda: True
        #: hears of each step's answer, before the engine does
        self.on_answer: Callable[[], None] = lambda: None
        self.deaths: list[Death] = []
        self.submitted = self.step_errors = self._steps = self._tokens = 0
        self._errors_too = self._fails_next = self._overdue = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    # ------------------------------------------------------------------ what the engine calls

    async def start(self, spec: WorkerSpec, on_phase: Callable[[StartPhase], None]) -> WorkerReady:
        """Start the workers; the time to the next kill begins when they are ready."""
        ready = await self._inner.start(spec, on_phase)
        if self.deaths and self.deaths[-1].ready_at is None:
            self.deaths[-1].ready_at = time.perf_counter()
        self._up.set()
        self._set_timer()
        return ready

    def submit(self, step: StepInput) -> None:
        """Hand over one step."""
        self.submitted += 1
        if self._fails_next and isinstance(self._inner, FakeExecutor):
            self._fails_next = False
            self.step_errors += 1
            self._inner.fail_at[step.step] = RuntimeError("a step that fails, as the benchmark wants it")
        self._inner.submit(step)

    async def close(self) -> None:
        """End the workers."""
        self._stop_timer()
        await self._inner.close()

    def _answered(self, result: StepResult) -> None:
        if isinstance(result, StepOutput):
            self._steps += 1
            self._tokens += len(result.tokens)
        if self.deaths and isinstance(result, StepOutput) and result.tokens:
            death = self.deaths[-1]
            if death.ready_at is not None and death.resumed_at is None:
                death.resumed_at = time.perf_counter()
        if self._overdue and self._tokens:
            self._overdue = False
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.kill)  # behind the engine's turn, or this very token would be lost
        self.on_answer()
        self.on_result(result)

    def _failed(self, error: CorogenError) -> None:
        self._stop_timer()
        self._up.clear()
        if self.deaths and self.deaths[-1].noticed_at is None:
            self.deaths[-1].noticed_at = time.perf_counter()
        self.on_failure(error)

    # ------------------------------------------------------------------ what the benchmark calls, on the engine's loop

    async def arm(self, every_s: float, busy: Callable[[], bool], *, errors_too: bool = False) -> None:
        """Kill from now on. `busy()` says whether there is anything to resume.

        With `errors_too` every second fault of a scripted worker is an exception in a step instead.
        """
        self._every_s, self._busy, self._errors_too = every_s, busy, errors_too
        if self._up.is_set():
            self._set_timer()

    async def disarm(self, timeout_s: float) -> None:
        """No kill any more; returns when the workers are up. Raises TimeoutError if they are not in time."""
        self._every_s = None
        self._stop_timer()
        await asyncio.wait_for(self._up.wait(), timeout_s)

    def kill(self) -> None:
        """Kill the workers with SIGKILL, or let the scripted one die."""
        if not self._up.is_set():
            return
        self._up.clear()
        self.deaths.append(Death(time.perf_counter(), self._busy(), steps=self._steps, tokens=self._tokens))
        self._steps = self._tokens = 0
        if isinstance(self._inner, FakeExecutor):
            self._inner.die()
            return
        for pid in self._inner.pids:  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)

    def _set_timer(self) -> None:
        self._stop_timer()
        if self._every_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._strike)

    def _strike(self) -> None:
        if self._errors_too and isinstance(self._inner, FakeExecutor) and self.step_errors < len(self.deaths):
            self._fails_next = True
            self._set_timer()
        elif self._busy() and not self._tokens:
            self._overdue = True
        else:
            self.kill()

    def _stop_timer(self) -> None:
        self._overdue = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
