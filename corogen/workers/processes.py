"""The executor of every day: one worker process a device."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Generic, TypeVar

from corogen import errors
from corogen.errors import CorogenError, WorkerDied, WorkerStartError
from corogen.wire.messages import (
    FromWorker,
    StartPhase,
    StepInput,
    TaskInput,
    TaskSpec,
    WorkerFailed,
    WorkerReady,
    WorkerSpec,
)
from corogen.workers.executor import StepResult, TaskResult
from corogen.workers.supervisor import WorkerProcess

Spec = TypeVar("Spec", WorkerSpec, TaskSpec)
Step = TypeVar("Step", StepInput, TaskInput)
Result = TypeVar("Result", StepResult, TaskResult)


class ProcessExecutor(Generic[Spec, Step, Result]):
    """Steps go to the worker over a socket pair; its answers come back on the engine's loop.

    Args:
        start_timeout_s: bound on the whole start-up; None for no bound.
        step_timeout_s: bound on one step; a worker that exceeds it is killed.
    """

    on_result: Callable[[Result], None]
    on_failure: Callable[[CorogenError], None]

    def __init__(self, *, start_timeout_s: float | None = None, step_timeout_s: float | None = None) -> None:
        self._start_timeout_s, self._step_timeout_s = start_timeout_s, step_timeout_s
        self._worker: WorkerProcess | None = None
        self._ready: asyncio.Future[WorkerReady] | None = None
        self._phase = "spawn"
        self._on_phase: Callable[[StartPhase], None] = lambda _: None
        self._in_flight: collections.deque[int] = collections.deque()
        self._watchdog: asyncio.TimerHandle | None = None
        self._failure: CorogenError | None = None
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [self._worker.pid] if self._worker and self._worker.pid else []

    async def start(self, spec: Spec, on_phase: Callable[[StartPhase], None]) -> WorkerReady:
        """Start the worker and wait until it is ready.

        Raises:
            CorogenError: the worker's own error, or WorkerStartError with its traceback, or the phase that took too
                long.
        """
        self._on_phase, self._phase = on_phase, "spawn"
        self._closing, self._failure = False, None
        self._in_flight.clear()
        self._ready = asyncio.get_running_loop().create_future()
        self._worker = WorkerProcess(spec.rank, self._received, self._exited)
        try:
            await self._worker.start()
            self._worker.send(spec)
            return await asyncio.wait_for(self._ready, self._start_timeout_s)
        except BaseException as error:
            self._worker.kill()  # it may be in the middle of an import, deaf to politeness
            await self.close()
            if isinstance(error, TimeoutError):
                raise WorkerStartError(
                    f"worker {spec.rank} was still in phase {self._phase!r} after "
                    f"start_timeout_s={self._start_timeout_s}"
                ) from None
            raise

    def submit(self, step: Step) -> None:
        """Send one step."""
        if self._worker is None:
            raise WorkerStartError("the worker is not running")
        self._worker.send(step)  # first: a message that can not be encoded is no step in flight
        self._in_flight.append(step.step)
        self._rearm(only_if_off=True)

    async def close(self) -> None:
        """End the worker: politely, then by force."""
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._worker is not None:
            await self._worker.stop()

    def _received(self, message: FromWorker) -> None:
        match message:
            case StartPhase():
                self._phase = message.name
                self._on_phase(message)
            case WorkerReady():
                self._settle(message)
            case WorkerFailed():
                self._settle(_start_error(message))
            case _:
                self._in_flight.popleft()
                self._rearm()
                self.on_result(message)  # type: ignore[arg-type]  # a worker answers as it was asked

    def _settle(self, outcome: WorkerReady | CorogenError) -> None:
        if self._ready is None or self._ready.done():
            return
        if isinstance(outcome, CorogenError):
            self._ready.set_exception(outcome)
        else:
            self._ready.set_result(outcome)

    def _rearm(self, *, only_if_off: bool = False) -> None:
        """The oldest step in flight has `step_timeout_s` from the moment that it is the oldest."""
        if self._watchdog is not None:
            if only_if_off:
                return
            self._watchdog.cancel()
            self._watchdog = None
        if self._in_flight and self._step_timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._watchdog = loop.call_later(self._step_timeout_s, self._step_overdue)

    def _step_overdue(self) -> None:
        self._failure = errors.StepFailed(
            f"step {self._in_flight[0]} took longer than step_timeout_s={self._step_timeout_s}"
        )
        if self._worker is not None:
            self._worker.kill()

    def _exited(self, code: int | None) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        worker = self._worker
        if worker is None or self._closing:
            return
        if self._ready is not None and not self._ready.done():
            self._settle(
                WorkerStartError(
                    f"worker {worker.rank} ended with exit code {code} in phase {self._phase!r}:\n{worker.stderr_tail}"
                )
            )
        else:
            self.on_failure(self._failure or WorkerDied(worker.rank, code, worker.stderr_tail))


def _start_error(message: WorkerFailed) -> CorogenError:
    """The worker's error as the class that it was there, if that class takes a message alone."""
    kind = getattr(errors, message.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.ModelError):
        return kind(message.message)
    if kind is errors.ConfigError:
        return errors.ConfigError(message.message)
    return WorkerStartError(f"a worker failed in phase {message.phase!r}:\n{message.traceback}")
