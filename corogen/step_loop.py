"""The heart: inbox → plan → dispatch → oldest result → apply → publish."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable

from corogen.deadlines import Deadlines
from corogen.errors import CorogenError, RequestFailed, StepFailed
from corogen.intake import Intake
from corogen.outputs import EngineStats, StepRecord
from corogen.request import ActiveRequest
from corogen.schedule import Plan, Scheduler, Sequence
from corogen.stream import Outlet
from corogen.telemetry import Telemetry
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

    #: what to do when a step fails and the worker lives; gets the error, the name of the exception's class, and the
    #: step's sequences
    on_step_error: Callable[[StepFailed, str, list[Sequence]], None]

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, depth: int, intake: Intake, on_idle: Callable[[], None]
    ) -> None:
        self.scheduler = scheduler
        self._executor, self._depth, self._intake, self._on_idle = executor, depth, intake, on_idle
        self._in_flight: deque[tuple[Plan, float]] = deque()
        self._last_result = 0.0
        self._results: deque[StepResult] = deque()
        self._outlets: list[Outlet] = []
        self._active: dict[str, ActiveRequest] = {}
        self._outside: deque[ActiveRequest] = deque()
        self._deadlines = Deadlines(self._expired)
        self.telemetry = Telemetry()
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
        """A new request; without room inside it waits outside."""
        self._active[active.request.id] = active
        self._deadlines.watch(active)
        if active.inside:
            self.scheduler.add(active.seq)
        else:
            self._outside.append(active)
            self._let_in()

    def abort(self, request_id: str) -> None:
        """End a request; unknown and ended ids are fine."""
        active = self._active.get(request_id)
        if active is not None:
            active.abort()
            self._end(active, "abort")

    def fail_all(self, error: BaseException) -> None:
        """Every request ends with `error`."""
        for active in reversed(list(self._active.values())):  # so that nobody comes in from outside meanwhile
            self._fail(active, error)

    def _expired(self, active: ActiveRequest, error: CorogenError) -> None:
        """A deadline has passed."""
        self._fail(active, error, "timeout")
        self.wake()

    def _let_in(self) -> None:
        """In the order of arrival, as far as there is room."""
        outside = self._outside
        while outside and (outside[0].request.id not in self._active or self._intake.let_in(outside[0])):
            active = outside.popleft()
            if active.inside:
                self.scheduler.add(active.seq)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, those outside included."""
        return self.scheduler.num_waiting + len(self._outside)

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    def stats(self, *, posted: int, restarts: int) -> EngineStats:
        """A picture of this moment, from any thread; `posted` requests are on their way here."""
        scheduler, telemetry, counts = self.scheduler, self.telemetry, self.scheduler.pool.counts
        return EngineStats(
            running=len(scheduler.running),
            waiting=self.num_waiting + posted,
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_used=counts.used,
            steps=self.steps,
            preemptions=scheduler.preemptions,
            restarts=restarts,
            cached_tokens=scheduler.cached_tokens,
            prompt_tokens=telemetry.prompt_tokens,
            new_tokens=telemetry.new_tokens,
            ended=dict(self.ended),
            queue_time=telemetry.queue_time.times(),
            first_token_time=telemetry.first_token_time.times(),
            request_time=telemetry.request_time.times(),
            step_time=telemetry.step_time.times(),
        )

    async def run(self, drain_inbox: Callable[[], None]) -> None:
        """Serve until cancelled. `drain_inbox` applies what other threads have posted."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            drain_inbox()
            self.apply_results()
            self._dispatch()
            self.flush()
            if self.scheduler.idle:  # behind the answers: it looks at every block
                self.scheduler.check()

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
                return
            now = time.monotonic()
            self._in_flight.append((plan, now))
            try:
                self._executor.submit(plan.message())
            except Exception as error:  # of one request in the step: found and failed as one that breaks the worker
                failure = StepError(plan.step, plan.epoch, traceback.format_exc(), type(error).__name__)
                self._step_failed(plan, failure)
                continue
            for seq in plan.started:
                self._started(seq.owner, now)

    def _started(self, active: ActiveRequest, now: float) -> None:
        """The request got a slot: for the first time, or again after a preemption or a fault."""
        if active.started_at is None:
            self.telemetry.started(active, now)
            self._deadlines.started(active.request.id)
            self._intake.started(active)
            if self._outside:
                self._let_in()

    def _on_result(self, result: StepResult) -> None:
        self._results.append(result)
        self._awake.set()

    def _apply(self, result: StepResult) -> None:
        if not self._in_flight or result.step != self._in_flight[0][0].step:
            return  # of an epoch that was rolled back
        plan, dispatched = self._in_flight.popleft()
        began, self._last_result = max(dispatched, self._last_result), time.monotonic()
        if isinstance(result, StepOutput):
            self._apply_tokens(plan, result)
            self._record(plan, self._last_result - began)
        elif isinstance(result, StepError):
            self._step_failed(plan, result)

    def _apply_tokens(self, plan: Plan, result: StepOutput) -> None:
        scheduler = self.scheduler
        for seq, token in scheduler.complete(plan, result.tokens):
            active: ActiveRequest = seq.owner
            if active.first_token_at is None:
                self.telemetry.first_token(active, self._last_result)
            try:
                reason = active.advance(token)
                if reason is not None:
                    self._end(active, reason)
            except Exception as error:
                self._broke(active, error)
        scheduler.retire(plan)

    def _record(self, plan: Plan, duration_s: float) -> None:
        self.steps += 1
        prefill, decode, running = len(plan.prefill_rows), len(plan.decode_rows), len(self.scheduler.running)
        self.log.append(StepRecord(plan.step, prefill, decode, running, self.scheduler.num_waiting, duration_s))
        self.telemetry.step(plan.step, prefill, decode, running, duration_s)

    def _step_failed(self, plan: Plan, result: StepError) -> None:
        error = StepFailed(f"the worker could not compute step {result.step}:\n{result.traceback}")
        logger.error("%s", error)
        self.on_step_error(error, result.kind, plan.sequences)

    def apply_results(self) -> None:
        """What has arrived counts, also if the workers died since."""
        while self._results:
            self._apply(self._results.popleft())

    def computing(self) -> list[Sequence]:
        """The sequences of the oldest step in flight, which is the one that the workers compute."""
        return self._in_flight[0][0].sequences if self._in_flight else []

    def roll_back(self, *, contents_lost: bool) -> list[Sequence]:
        """Steps in flight will never count: every sequence waits with the tokens it has. Returns those that ran."""
        ran = list(self.scheduler.running)
        self._in_flight.clear()
        self._results.clear()
        self.scheduler.rollback(contents_lost=contents_lost)
        return ran

    def fail(self, seq: Sequence, error: CorogenError) -> None:
        """End one sequence's request with `error`."""
        self._fail(seq.owner, error)

    def _broke(self, active: ActiveRequest, error: Exception) -> None:
        """A fault of one request harms no other."""
        logger.exception("request %s failed", active.request.id)
        failure = RequestFailed(f"request {active.request.id} failed: {error!r}")
        failure.__cause__ = error
        self._fail(active, failure)

    def _fail(self, active: ActiveRequest, error: BaseException, reason: str = "error") -> None:
        if active.request.id in self._active:
            active.sink.fail(error)
            self._end(active, reason)

    def _end(self, active: ActiveRequest, reason: str) -> None:
        """The one terminal transition."""
        if self._active.pop(active.request.id, None) is None:
            return
        self.scheduler.end(active.seq)
        self.ended[reason] += 1
        self._deadlines.ended(active.request.id)
        self.telemetry.ended(active, reason, len(self.scheduler.running), time.monotonic())
        if self._intake.left(active):
            self._on_idle()
        elif self._outside:
            self._let_in()
