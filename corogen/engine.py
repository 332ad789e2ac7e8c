"""The engine: everything from an admitted request to its last token, on one event loop, in coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from corogen import startup
from corogen.config import EngineConfig, check_config
from corogen.errors import ConfigError, CorogenError, EngineClosed, InvalidRequest
from corogen.inbox import Inbox
from corogen.intake import Intake
from corogen.memory import give_back
from corogen.outputs import EngineStats, Response, StepRecord
from corogen.params import GenerationConfig, WhenFull, check_timeout, may_wait
from corogen.stream import Outgoing, Outlet, ResponseStream
from corogen.text.pool import TextPool
from corogen.wire.messages import StartPhase, WorkerReady, WorkerSpec
from corogen.workers.descriptors import fill_standard_streams

if TYPE_CHECKING:
    from corogen.admission import Admission, Request
    from corogen.recovery import Health, Recovery
    from corogen.request import Sink
    from corogen.step_loop import StepLoop
    from corogen.text.tokenizer import Tokenizer
    from corogen.workers.executor import Executor

logger = logging.getLogger("corogen.engine")
request_logger = logging.getLogger("corogen.requests")


class Engine:
    """Serves one model on the event loop that starts it.

    ::

        async with Engine("path-or-hub-id", EngineConfig()) as engine:
            answer = await engine.generate("Hakuna Matata")
            async with engine.stream("Once upon a time") as pieces:
                async for piece in pieces: ...

    `generate`, `generate_batch` and `stream` belong to the engine's own loop. `prepare`, `submit`, `abort`, `stats`
    and `step_log` may be called from any thread; adapters are built on them.

    Args:
        model: a folder, a hub id, a `.gguf` file, or a short name such as `demo`.
        config: the settings; checked here, before anything is loaded.
        executor: what computes; None: worker processes, or what `distributed_executor_backend` says.
        tokenizer: only for an executor that needs no model.

    Raises:
        ConfigError: naming everything that is wrong with `config`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.config = EngineConfig() if config is None else config
        check_config(self.config)
        if model is None and executor is None:
            raise ConfigError("no model was named: pass a folder, a .gguf file, a hub id, or 'demo'")
        if model is not None and not isinstance(model, str | os.PathLike):
            raise ConfigError(f"the model must be a name or a path, not {model!r}")
        self.model = None if model is None else os.fspath(model)
        self._executor, self._tokenizer = executor, tokenizer
        self._intake = Intake(self.config.queue_size, self.config.max_waiting_tokens)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._steps: StepLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._closing = False
        self._released: asyncio.Task[None] | None = None
        #: for long text work, which must not hold up a loop
        self.text_pool = TextPool()
        self._admission: Admission | None = None
        self._ready: WorkerReady | None = None
        self._recovery: Recovery | None = None
        self._respawn_spec: WorkerSpec | None = None

    # ------------------------------------------------------------------ life

    async def start(self, progress: Callable[[StartPhase], None] | None = None) -> None:
        """Load the model and be ready for requests. `progress` hears of each start-up phase.

        Raises:
            ModelError: the model can not be found, read or served.
            WorkerStartError: a worker failed; with its traceback.
        """
        if self._loop is not None:
            raise EngineClosed("an engine starts once: make a new one")
        fill_standard_streams()
        self._loop = asyncio.get_running_loop()
        try:
            await self._load(startup.harmless(progress or _log_phase))
        except BaseException:
            await self._release()
            raise
        self._intake.open()

    async def _load(self, progress: Callable[[StartPhase], None]) -> None:
        from corogen.recovery import Recovery
        from corogen.step_loop import StepLoop

        config = self.config
        path = None
        if self.model is not None:
            path = await startup.find_model(self.model, config, self.text_pool, progress)
        executor = self._executor = self._executor or startup.make_executor(config)
        executor.on_failure = self._workers_failed
        spec = startup.worker_spec(config, path)
        ready, files = await startup.start_workers(executor, spec, path, config, self.text_pool, progress)
        self._ready = ready
        for line in ready.warnings:
            logger.warning("%s", line)
        max_len = startup.max_len(config, ready, spec.block_size)
        self._admission = startup.make_admission(config, files, self._tokenizer, max_len, ready.vocab_size)
        scheduler = startup.make_scheduler(config, ready, spec.block_size)
        intake = self._intake
        steps = self._steps = StepLoop(scheduler, executor, depth=config.pp + 1, intake=intake, on_idle=self._idle.set)
        self._respawn_spec = msgspec.structs.replace(spec, num_blocks=ready.num_blocks)
        self._recovery = Recovery(
            steps, self._restart_workers, resume=config.on_worker_failure == "resume", on_fatal=self._give_up
        )
        steps.on_step_error = self._recovery.step_failed
        intake.connect(steps, Inbox(asyncio.get_running_loop(), steps.wake))
        self._task = asyncio.get_running_loop().create_task(self._run(steps))
        logger.info("%s", self.describe())

    async def _restart_workers(self) -> None:
        if self._executor is not None and self._respawn_spec is not None:
            await self._executor.close()
            self._ready = await self._executor.start(self._respawn_spec, _log_phase)

    async def _run(self, steps: StepLoop) -> None:
        """The step loop; if it ever fails, everybody learns of it at once."""
        try:
            await steps.run(self._intake.drain)
        except Exception as error:
            logger.exception("the engine's loop failed")
            failure = EngineClosed(f"the engine's loop failed: {error!r}")
            failure.__cause__ = error
            self._give_up(failure)

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Close the engine. Requests that still run get EngineClosed, unless `drain` lets them finish first.

        Idempotent; calls may overlap, and one without `drain` ends the draining of another. `timeout_s` bounds it.

        Raises:
            InvalidRequest: `timeout_s` is no number of seconds.
        """
        check_timeout(timeout_s)
        if self._loop is None:
            return
        self._closing = True
        self._intake.refuse(EngineClosed("the engine is closed"))
        if drain and self._released is None:
            await self._drained(timeout_s)
        if self._released is None:
            self._released = asyncio.get_running_loop().create_task(self._release())
        await asyncio.shield(self._released)

    async def _drained(self, timeout_s: float | None) -> None:
        self._idle.clear()
        if self._intake.request_ids():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def _release(self) -> None:
        """Let go of everything, in an order that leaves no waiter without an answer."""
        if self._recovery is not None:
            await self._recovery.stop()
        self._fail_all(EngineClosed("the engine was closed before the answer was complete"))
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._executor is not None and self._ready is not None:
            await self._executor.close()
        self.text_pool.close()
        give_back()

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------ requests, from any thread

    def prepare(
        self,
        prompt: Any,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        request_id: str | None = None,
    ) -> Request:
        """Check a prompt and its settings and turn both into a request.

        Raises:
            InvalidRequest: naming the value and the remedy.
            EngineClosed: the engine is not running.
        """
        self.check_open()
        return self.admission.prepare(prompt, gen_config, do_preprocess=do_preprocess, request_id=request_id)

    def check_open(self) -> None:
        """Raise EngineClosed unless requests are taken, in this process."""
        self._intake.check_open()
        if os.getpid() != self._pid:
            raise EngineClosed(
                f"the engine runs in process {self._pid}, and this is process {os.getpid()}, forked from it: make the "
                "engine here, or send the requests there"
            )

    def submit(self, request: Request, sink: Sink, *, wait: bool = False) -> None:
        """Queue a prepared request; its output goes to `sink`. Never blocks; without room it waits outside with `wait`.

        Raises:
            QueueFullError: `queue_size` or `max_waiting_tokens` are reached.
            InvalidRequest: the request's id is in use.
            EngineClosed: the engine is closed or closing.
        """
        from corogen.request import ActiveRequest

        self.check_open()
        active = ActiveRequest(request, sink, self.admission.tokenizer)
        self._intake.submit(active, wait=wait)
        if self.config.log_prompts:
            self._log_prompt(request)

    def _log_prompt(self, request: Request) -> None:
        tokenizer = self.admission.tokenizer
        text = request.prompt_ids if tokenizer is None else tokenizer.decode(request.prompt_ids)
        request_logger.info("request %s prompt=%r", request.id, text, extra={"request_id": request.id})

    def wait_for_room(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Block the calling thread until a request would have room, or the engine takes none any more.

        Also until `unless()`, which is asked again after `wake_waiters`.
        """
        self._intake.wait_for_room(unless)

    def wake_waiters(self) -> None:
        """Let those in `wait_for_room` look again."""
        self._intake.wake_waiters()

    def abort(self, request_id: str) -> None:
        """End a request as aborted. Safe from any thread, at any time, more than once, and for unknown ids."""
        self._intake.abort(request_id)

    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended. Safe from any thread."""
        return self._intake.request_ids()

    def _workers_failed(self, error: CorogenError) -> None:
        if self._recovery is not None and not self._intake.refusing:
            self._recovery.workers_died(error)
        else:
            self._give_up(error)

    def _give_up(self, error: CorogenError) -> None:
        """No step will be answered any more."""
        self._intake.refuse(error)
        self._fail_all(error)

    def _fail_all(self, error: CorogenError) -> None:
        if self._steps is not None:
            self._intake.drain()
            self._steps.fail_all(error)
            self._steps.flush()

    # ------------------------------------------------------------------ requests, on the engine's own loop

    def stream(
        self,
        prompt: Any,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        request_id: str | None = None,
        pieces: bool = True,
        index: int = 0,
        when_full: WhenFull = "raise",
    ) -> ResponseStream:
        """Submit a prompt and return its pieces as they come; with `pieces=False` one piece, the whole answer.

        With `when_full="wait"` a request for which there is no room waits for its turn.
        Raises what `prepare` and `submit` raise, at the call.
        """
        request = self.prepare(prompt, gen_config, do_preprocess=do_preprocess, request_id=request_id)
        out = Outgoing(Outlet(self.steps.register_outlet), pieces=pieces, index=index, request_id=request.id)
        stream = ResponseStream(self, out, request.id)
        self.submit(request, out, wait=may_wait(when_full))
        return stream

    async def generate(
        self,
        prompt: Any,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        request_id: str | None = None,
        index: int = 0,
        when_full: WhenFull = "raise",
    ) -> Response:
        """The whole answer to one prompt. Cancelling the caller aborts the request."""
        async with self.stream(
            prompt,
            gen_config,
            do_preprocess=do_preprocess,
            request_id=request_id,
            pieces=False,
            index=index,
            when_full=when_full,
        ) as answer:
            return await anext(answer)

    # ------------------------------------------------------------------ figures

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The engine's own loop. Raises EngineClosed before the engine has started."""
        if self._loop is None:
            raise self._intake.refused()
        return self._loop

    @property
    def admission(self) -> Admission:
        """What turns prompts into requests. Raises EngineClosed before the engine has started."""
        if self._admission is None:
            raise self._intake.refused()
        return self._admission

    @property
    def steps(self) -> StepLoop:
        """The step loop. Raises EngineClosed before the engine has started."""
        if self._steps is None:
            raise self._intake.refused()
        return self._steps

    @property
    def ready(self) -> WorkerReady:
        """What the workers said when they became ready."""
        if self._ready is None:
            raise self._intake.refused()
        return self._ready

    @property
    def health(self) -> Health:
        """State, restarts and the last fault; safe from any thread, also before the start and after the end."""
        from corogen.recovery import health

        return health(self._recovery, closed=self._closing, refusing=self._intake.refusing)

    def stats(self) -> EngineStats:
        """A picture of the engine at this moment."""
        restarts = self._recovery.restarts if self._recovery else 0
        return self.steps.stats(posted=self._intake.num_posted, restarts=restarts)

    def step_log(self, count: int = 100) -> list[StepRecord]:
        """The last `count` steps, oldest first. Raises InvalidRequest for a negative count."""
        if type(count) is not int or count < 0:
            raise InvalidRequest(f"step_log takes a number of steps, not {count!r}", param="count")
        return list(self.steps.log)[-count:] if count else []

    def describe(self) -> str:
        """One line: what the cache holds."""
        return startup.describe(self.ready, self.steps.scheduler.block_size, self.admission.facts.max_len)


def _log_phase(phase: StartPhase) -> None:
    logger.debug("start-up: %s %d/%d", phase.name, phase.done, phase.total)
