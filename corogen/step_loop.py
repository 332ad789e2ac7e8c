"""The heart: inbox → plan → dispatch → oldest result → apply → publish."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from corogen.errors import CorogenError, RequestFailed, StepFailed
from corogen.outputs import StepRecord
from corogen.request import ActiveRequest
from corogen.schedule import Plan, Scheduler, Sequence
from corogen.stream import Outlet
from corogen.wire.messages import StepError, StepOutput
from corogen.workers.executor import Executor, StepResult

logger = logging.getLogger("corogen.engine")

#: step records that are kept
STEP_LOG_SIZE = 4096


class StepLoop:
    """Keeps `depth` steps in flight and turns results into text.

    Everything runs on one loop. `wake` is called when there is a reason to look: a new request, an abort, a result.
    Between those the loop sleeps; nothing is polled.
    """

    #: what to do when a worker raises in a step; gets the error and the name of the exception's class
    on_step_error: Callable[[StepFailed, str], None]

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, depth: int, on_end: Callable[[ActiveRequest], None]
    ) -> None:
        self.scheduler = scheduler
        self._executor, self._depth, self._on_end = executor, depth, on_end
        self._in_flight: deque[tuple[Plan, float]] = deque()
        self._results: deque[StepResult] = deque()
        self._outlets: list[Outlet] = []
        self._active: dict[str, ActiveRequest] = {}
        self._awake = asyncio.Event()
        #: no step is dispatched while the workers are down
        self.suspended = False
        self.log: deque[StepRecord] = deque(maxlen=STEP_LOG_SIZE)
        self.steps = 0
        self.ended: Counter[str] = Counter()
        executor.on_result = self._on_result

    # ------------------------------------------------------------------ on the engine's loop, from the engine

    def wake(self) -> None:
        """Look again at the next turn."""
        self._awake.set()

    def register_outlet(self, outlet: Outlet) -> None:
        """`outlet` has something to flush at the end of this pass."""
        self._outlets.append(outlet)

    def add(self, active: ActiveRequest) -> None:
        """A new request."""
        self._active[active.request.id] = active
        self.scheduler.add(active.seq)

    def abort(self, request_id: str) -> None:
        """End a request; unknown and ended ids are fine."""
        active = self._active.get(request_id)
        if active is not None:
            active.abort()
            self._end(active, "abort")

    def fail_all(self, error: BaseException) -> None:
        """Every request ends with `error`."""
        for active in list(self._active.values()):
            active.sink.fail(error)
            self._end(active, "error")

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    async def run(self, drain_inbox: Callable[[], None]) -> None:
        """Serve until cancelled. `drain_inbox` applies what other threads have posted."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            drain_inbox()
            while self._results:
                self._apply(self._results.popleft())
            self._dispatch()
            self.flush()

    def flush(self) -> None:
        """Publish: one post per consumer context."""
        while self._outlets:
            outlets, self._outlets = self._outlets, []
            for outlet in outlets:
                outlet.flush()

    # ------------------------------------------------------------------ steps

    def _dispatch(self) -> None:
        while len(self._in_flight) < self._depth and not self.suspended:
            plan = self.scheduler.plan()
            if plan is None:
                if self.scheduler.idle:
                    self.scheduler.check()
                return
            self._in_flight.append((plan, time.perf_counter()))
            self._executor.submit(plan.message())

    def _on_result(self, result: StepResult) -> None:
        self._results.append(result)
        self._awake.set()

    def _apply(self, result: StepResult) -> None:
        if not self._in_flight or result.step != self._in_flight[0][0].step:
            return  # of an epoch that was rolled back
        plan, since = self._in_flight.popleft()
        if isinstance(result, StepOutput):
            self._apply_tokens(plan, result, time.perf_counter() - since)
        elif isinstance(result, StepError):
            self._step_failed(result)

    def _apply_tokens(self, plan: Plan, result: StepOutput, duration_s: float) -> None:
        scheduler = self.scheduler
        for seq, token in scheduler.complete(plan, result.tokens):
            active: ActiveRequest = seq.owner
            try:
                reason = active.advance(token)
                if reason is not None:
                    self._end(active, reason)
            except Exception as error:
                self._fail(active, error)
        scheduler.retire(plan)
        self.steps += 1
        rows = len(plan.prefill_rows), len(plan.decode_rows)
        self.log.append(StepRecord(plan.step, *rows, len(scheduler.running), scheduler.num_waiting, duration_s))

    def _step_failed(self, result: StepError) -> None:
        error = StepFailed(f"the worker could not compute step {result.step}:\n{result.traceback}")
        logger.error("%s", error)
        self.on_step_error(error, result.kind)

    def roll_back(self, *, contents_lost: bool) -> list[Sequence]:
        """Steps in flight will never count: every sequence waits with the tokens it has. Returns those that ran."""
        ran = list(self.scheduler.running)
        self._in_flight.clear()
        self._results.clear()
        self.scheduler.rollback(contents_lost=contents_lost)
        return ran

    def fail(self, seq: Sequence, error: CorogenError) -> None:
        """End one sequence's request with `error`."""
        active: ActiveRequest = seq.owner
        active.sink.fail(error)
        self._end(active, "error")

    def _fail(self, active: ActiveRequest, error: Exception) -> None:
        """A fault of one request harms no other."""
        logger.exception("request %s failed", active.request.id)
        failure = RequestFailed(f"request {active.request.id} failed: {error!r}")
        failure.__cause__ = error
        active.sink.fail(failure)
        self._end(active, "error")

    def _end(self, active: ActiveRequest, reason: str) -> None:
        """The one terminal transition."""
        if self._active.pop(active.request.id, None) is not None:
            self.scheduler.end(active.seq)
            self.ended[reason] += 1
            self._on_end(active)
