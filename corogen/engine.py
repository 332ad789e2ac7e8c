"""The engine: everything from an admitted request to its last token, on one event loop, in coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from corogen import startup
from corogen.config import EngineConfig, check_config
from corogen.errors import ConfigError, CorogenError, EngineClosed, InvalidRequest, QueueFullError
from corogen.inbox import Inbox
from corogen.outputs import EngineStats, Response, StepRecord
from corogen.params import GenerationConfig
from corogen.stream import Outgoing, Outlet, ResponseStream
from corogen.wire.messages import StartPhase, WorkerReady, WorkerSpec

if TYPE_CHECKING:
    from corogen.admission import Admission, Request
    from corogen.recovery import Health, Recovery
    from corogen.request import ActiveRequest, Sink
    from corogen.step_loop import StepLoop
    from corogen.text.tokenizer import Tokenizer
    from corogen.workers.executor import Executor

logger = logging.getLogger("corogen.engine")

_TEXT_THREADS = 2


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
        self._lock = threading.RLock()  # a stream that the collector drops may abort in the middle of a submit
        self._inbox: Inbox | None = None
        self._ids: set[str] = set()
        self._refusal: CorogenError | None = EngineClosed("the engine is not started: use `async with` or `start()`")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._steps: StepLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._closed: asyncio.Future[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
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
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._pool = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="corogen-text")
        try:
            await self._load(progress or _log_phase)
        except BaseException:
            await self._release()
            raise
        self._refusal = None

    async def _load(self, progress: Callable[[StartPhase], None]) -> None:
        from corogen.recovery import Recovery
        from corogen.step_loop import StepLoop

        config = self.config
        path = await self._resolve(progress)
        executor = self._executor = self._executor or startup.make_executor(config)
        executor.on_failure = self._workers_failed
        spec = startup.worker_spec(config, path)
        ready = self._ready = await executor.start(spec, progress)
        for line in ready.warnings:
            logger.warning("%s", line)
        max_len = startup.max_len(config, ready)
        self._admission = await self.run_in_pool(
            startup.make_admission, config, path, self._tokenizer, max_len, ready.vocab_size
        )
        scheduler = startup.make_scheduler(config, ready)
        steps = self._steps = StepLoop(scheduler, executor, depth=config.pp + 1, on_end=self._request_ended)
        self._respawn_spec = msgspec.structs.replace(spec, num_blocks=ready.num_blocks)
        self._recovery = Recovery(
            steps, self._restart_workers, resume=config.on_worker_failure == "resume", on_fatal=self._give_up
        )
        steps.on_step_error = self._recovery.step_failed
        self._inbox = Inbox(asyncio.get_running_loop(), steps.wake)
        self._task = asyncio.get_running_loop().create_task(self._run(steps, self._inbox))
        logger.info("%s", self.describe())

    async def _resolve(self, progress: Callable[[StartPhase], None]) -> Path | None:
        if self.model is None:
            return None
        from corogen.model.source import resolve_model

        loop = asyncio.get_running_loop()

        def report(what: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(progress, StartPhase(what, done, total))

        config = self.config
        resolve = functools.partial(
            resolve_model, self.model, revision=config.revision, download_dir=config.download_dir, progress=report
        )
        path: Path = await self.run_in_pool(resolve)
        return path

    async def _restart_workers(self) -> None:
        if self._executor is not None and self._respawn_spec is not None:
            await self._executor.close()
            self._ready = await self._executor.start(self._respawn_spec, _log_phase)

    async def _run(self, steps: StepLoop, inbox: Inbox) -> None:
        """The step loop; if it ever fails, everybody learns of it at once."""
        try:
            await steps.run(inbox.drain)
        except Exception as error:
            logger.exception("the engine's loop failed")
            failure = EngineClosed(f"the engine's loop failed: {error!r}")
            failure.__cause__ = error
            self._give_up(failure)

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Close the engine. Requests that still run get EngineClosed, unless `drain` lets them finish first.

        Idempotent; a second call waits for the first. `timeout_s` bounds the draining.
        """
        if self._loop is None:
            return
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = asyncio.get_running_loop().create_future()
        with self._lock:
            self._refusal = EngineClosed("the engine is closed")
        if drain:
            await self._drained(timeout_s)
        await self._release()
        self._closed.set_result(None)

    async def _drained(self, timeout_s: float | None) -> None:
        self._idle.clear()
        if self._ids:
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
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

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
        """Raise EngineClosed unless requests are taken."""
        if self._refusal is not None:
            raise self._refused()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a prepared request; its output goes to `sink`. Never blocks.

        Raises:
            QueueFullError: `queue_size` requests are outstanding.
            InvalidRequest: the request's id is in use.
            EngineClosed: the engine is closed or closing.
        """
        from corogen.request import ActiveRequest

        limit = self.config.queue_size
        active = ActiveRequest(request, sink, self.admission.tokenizer)
        with self._lock:
            if self._refusal is not None:
                raise self._refused()
            if limit and len(self._ids) >= limit:
                raise QueueFullError(len(self._ids), limit)
            if request.id in self._ids:
                raise InvalidRequest(f"request id {request.id!r} is in use", param="request_id")
            self._ids.add(request.id)
            self._inbox_or_raise().put(self.steps.add, active)  # under the lock: who closes the engine finds it there
        self._inbox_or_raise().ring()

    def abort(self, request_id: str) -> None:
        """End a request as aborted. Safe from any thread, at any time, more than once, and for unknown ids."""
        if request_id in self._ids:
            self._inbox_or_raise().put(self.steps.abort, request_id)
            with contextlib.suppress(EngineClosed):
                self._inbox_or_raise().ring()

    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended. Safe from any thread."""
        with self._lock:
            return list(self._ids)

    def _request_ended(self, active: ActiveRequest) -> None:
        with self._lock:
            self._ids.discard(active.request.id)
            empty = not self._ids
        if empty:
            self._idle.set()

    def _workers_failed(self, error: CorogenError) -> None:
        if self._recovery is not None and self._refusal is None:
            self._recovery.workers_died(error)
        else:
            self._give_up(error)

    def _give_up(self, error: CorogenError) -> None:
        """No step will be answered any more."""
        with self._lock:
            self._refusal = self._refusal or error
        self._fail_all(error)

    def _fail_all(self, error: CorogenError) -> None:
        if self._steps is not None and self._inbox is not None:
            self._inbox.drain()
            self._steps.fail_all(error)
            self._steps.flush()

    def _refused(self) -> CorogenError:
        """A fresh exception of the stored kind: one object must not collect the tracebacks of many threads."""
        stored = self._refusal
        if isinstance(stored, EngineClosed) or stored is None:
            return EngineClosed(str(stored))
        closed = EngineClosed(f"the engine has stopped: {stored}")
        closed.__cause__ = stored
        return closed

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
    ) -> ResponseStream:
        """Submit a prompt and return its pieces as they come; with `pieces=False` one piece, the whole answer.

        Raises what `prepare` and `submit` raise, at the call.
        """
        request = self.prepare(prompt, gen_config, do_preprocess=do_preprocess, request_id=request_id)
        out = Outgoing(Outlet(self.steps.register_outlet), pieces=pieces, index=index, request_id=request.id)
        stream = ResponseStream(self, out, request.id)
        self.submit(request, out)
        return stream

    async def generate(
        self,
        prompt: Any,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        request_id: str | None = None,
        index: int = 0,
    ) -> Response:
        """The whole answer to one prompt. Cancelling the caller aborts the request."""
        options = {"do_preprocess": do_preprocess, "request_id": request_id, "index": index}
        async with self.stream(prompt, gen_config, pieces=False, **options) as answer:  # type: ignore[arg-type]
            return await anext(answer)

    # ------------------------------------------------------------------ figures

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The engine's own loop. Raises EngineClosed before the engine has started."""
        if self._loop is None:
            raise self._refused()
        return self._loop

    @property
    def owns_this_thread(self) -> bool:
        """Whether the caller runs in the thread of the engine's own loop, where nothing may block."""
        return threading.get_ident() == self._thread_id

    @property
    def admission(self) -> Admission:
        """What turns prompts into requests. Raises EngineClosed before the engine has started."""
        if self._admission is None:
            raise self._refused()
        return self._admission

    @property
    def steps(self) -> StepLoop:
        """The step loop. Raises EngineClosed before the engine has started."""
        if self._steps is None:
            raise self._refused()
        return self._steps

    @property
    def ready(self) -> WorkerReady:
        """What the workers said when they became ready."""
        if self._ready is None:
            raise self._refused()
        return self._ready

    def _inbox_or_raise(self) -> Inbox:
        if self._inbox is None:
            raise self._refused()
        return self._inbox

    def run_in_pool(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run a long piece of text work (tokenising, say) in the engine's own small thread pool."""
        return asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *args))

    def submit_to_pool(self, function: Callable[[], None]) -> concurrent.futures.Future[None]:
        """The same from any thread, for work that delivers its result itself. Raises EngineClosed."""
        try:
            if self._pool is not None:
                return self._pool.submit(function)
        except RuntimeError:
            pass
        raise EngineClosed("the engine is closed")

    @property
    def health(self) -> Health:
        """State, restarts and the last fault; safe from any thread, also before the start and after the end."""
        from corogen.recovery import Health, State

        recovery = self._recovery
        if self._closed is not None:
            state = State.CLOSED
        elif recovery is None:
            state = State.STARTING
        elif self._refusal is not None:
            state = State.FAILED
        else:
            state = State.RESTARTING if recovery.restarting else State.READY
        return Health(state, recovery.restarts if recovery else 0, recovery.last_error if recovery else None)

    def stats(self) -> EngineStats:
        """A picture of the engine at this moment."""
        steps, scheduler = self.steps, self.steps.scheduler
        counts = scheduler.pool.counts
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + len(self._inbox_or_raise()),
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_used=counts.used,
            steps=steps.steps,
            preemptions=scheduler.preemptions,
            restarts=self._recovery.restarts if self._recovery else 0,
            cached_tokens=scheduler.cached_tokens,
            ended=dict(steps.ended),
        )

    def step_log(self, count: int = 100) -> list[StepRecord]:
        """The last `count` steps, oldest first."""
        return list(self.steps.log)[-count:]

    def describe(self) -> str:
        """One line: what the cache holds."""
        return startup.describe(self.config, self.ready, self.admission.facts.max_len)


def _log_phase(phase: StartPhase) -> None:
    logger.debug("start-up: %s %d/%d", phase.name, phase.done, phase.total)
