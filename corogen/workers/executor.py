"""What carries steps to the workers and results back. The step loop knows nothing beyond this."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from corogen.errors import CorogenError, WorkerStartError
from corogen.wire.messages import (
    StartPhase,
    StepError,
    StepInput,
    StepOutput,
    StepSkipped,
    TaskError,
    TaskInput,
    TaskOutput,
    TaskSpec,
    WorkerReady,
    WorkerSpec,
)

if TYPE_CHECKING:
    from corogen.workers.runner import Runner

StepResult = StepOutput | StepError | StepSkipped


class Executor(Protocol):
    """Starts workers, takes steps in order, and answers each exactly once, in order, on the engine's loop.

    The engine sets `on_result` and `on_failure` before `start`. After `on_failure` no step is answered any more.
    """

    on_result: Callable[[StepResult], None]
    on_failure: Callable[[CorogenError], None]

    async def start(self, spec: WorkerSpec, on_phase: Callable[[StartPhase], None]) -> WorkerReady:
        """Start the workers and return when they can take steps. After `close` they may be started again."""

    def submit(self, step: StepInput) -> None:
        """Hand over one step; never blocks."""

    async def close(self) -> None:
        """End the workers; bounded in time."""


TaskResult = TaskOutput | TaskError


class TaskExecutor(Protocol):
    """The same for batches of tasks."""

    on_result: Callable[[TaskResult], None]
    on_failure: Callable[[CorogenError], None]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""

    async def start(self, spec: TaskSpec, on_phase: Callable[[StartPhase], None]) -> WorkerReady:
        """Start the workers and return when they can take batches. After `close` they may be started again."""

    def submit(self, step: TaskInput) -> None:
        """Hand over one batch; never blocks."""

    async def close(self) -> None:
        """End the workers; bounded in time."""


class InlineExecutor:
    """Computes steps in the engine's own thread: for debugging, since a breakpoint works and the loop stands still."""

    on_result: Callable[[StepResult], None]
    on_failure: Callable[[CorogenError], None]

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._failed_epoch = -1

    async def start(self, spec: WorkerSpec, on_phase: Callable[[StartPhase], None]) -> WorkerReady:
        """Load the model in a thread, so that the loop can still report phases.

        Raises:
            CorogenError: the loader's own error.
        """
        from corogen.workers.runner import Runner

        self._failed_epoch = -1
        self._runner = Runner(spec, on_phase)
        try:
            return await asyncio.to_thread(self._runner.load)
        except CorogenError:
            raise
        except Exception as error:
            raise WorkerStartError(f"the model could not be loaded:\n{traceback.format_exc()}") from error

    def submit(self, step: StepInput) -> None:
        """Compute at the loop's next turn, so that the caller is never re-entered."""
        asyncio.get_running_loop().call_soon(self._compute, step)

    def _compute(self, step: StepInput) -> None:
        if self._runner is not None:
            result = run_step(self._runner, step, self._failed_epoch)
            if isinstance(result, StepError):
                self._failed_epoch = step.epoch
            self.on_result(result)

    async def close(self) -> None:
        """Drop the model."""
        self._runner = None


def run_step(runner: Runner, step: StepInput, failed_epoch: int) -> StepResult:
    """Compute one step and wait for its ids; an exception becomes the step's answer."""
    if step.epoch <= failed_epoch:
        return StepSkipped(step.step, step.epoch)
    try:
        return StepOutput(step.step, step.epoch, runner.launch(step).wait())
    except Exception as error:
        return StepError(step.step, step.epoch, traceback.format_exc(), type(error).__name__)
