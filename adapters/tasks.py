"""`launch_engine`: any torch module behind one call, in EnergonAI's words."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import Any

from corogen.adapters.loop_thread import LoopThread
from corogen.adapters.results import Results
from corogen.adapters.sigint import SigintHandler
from corogen.adapters.task_handle import Completed, TaskHandle
from corogen.errors import ConfigError, RequestTimeout
from corogen.params import check_timeout
from corogen.tasks import payload
from corogen.tasks.batching import BatchManager
from corogen.tasks.engine import TaskEngine
from corogen.tasks.task import TaskStats
from corogen.wire.messages import StartPhase, TaskSpec
from corogen.workers.cpus import usable_cpus
from corogen.workers.processes import ProcessExecutor

logger = logging.getLogger("corogen.tasks")


def launch_engine(
    tp_world_size: int | None = None,
    pp_world_size: int | None = None,
    master_host: str | None = None,
    master_port: int | None = None,
    rpc_port: int | None = None,
    model_fn: Callable[..., Any] | None = None,
    n_nodes: int = 1,
    node_rank: int = 0,
    batch_manager: BatchManager | None = None,
    pipe_size: int = 1,
    queue_size: int = 0,
    rpc_disable_shm: bool | None = None,
    *,
    tp: int | None = None,
    pp: int | None = None,
    device_type: str = "auto",
    num_threads: int | None = None,
    start_timeout_s: float | None = None,
    step_timeout_s: float | None = None,
    result_ttl_s: float | None = 3600.0,
    progress: Callable[[StartPhase], None] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **model_arguments: Any,
) -> AsyncEngine:
    """Build a model in worker processes and return the engine that serves it.

    Args:
        tp_world_size, pp_world_size: also `tp` and `pp`; tensor-parallel ranks and pipeline stages.
        model_fn: called in every worker with the remaining arguments; what it returns is called with each batch. Any
            callable, also a lambda or a function of `__main__`.
        batch_manager: makes batches of tasks; None: one task a batch.
        pipe_size: batches that wait at each stage beyond the one that it computes.
        queue_size: tasks outstanding at most; 0: no bound.
        master_host, master_port, rpc_port, rpc_disable_shm, node_rank: EnergonAI's; not needed on one machine.
        device_type: "auto", "cpu" or "cuda".
        num_threads: CPU threads of each worker; None: an even share of the CPUs.
        start_timeout_s: bound on the start; None for none.
        step_timeout_s: bound on one batch; workers that exceed it are started again. None for none.
        result_ttl_s: a result that nobody has read for so long is dropped; None: never.
        progress: hears of the phases of the start, in the engine's thread.
        model_kwargs: further arguments of `model_fn`, for names that this function has itself.

    Raises:
        ConfigError: everything that is wrong with the arguments, before anything is started.
        WorkerStartError: `model_fn` raised, or a worker died; with its traceback.
    """
    if rpc_port is not None or rpc_disable_shm is not None:
        logger.warning("launch_engine: rpc_port and rpc_disable_shm do nothing here: there is no RPC")
    sizes = {"tp": _one_of("tp", tp, tp_world_size), "pp": _one_of("pp", pp, pp_world_size)}
    _check(sizes, model_fn, n_nodes, batch_manager, pipe_size, queue_size, device_type)
    for seconds in (start_timeout_s, step_timeout_s, result_ttl_s):
        check_timeout(seconds)
    spec = TaskSpec(
        model=_pickled(model_fn, {**(model_kwargs or {}), **model_arguments}),
        sys_path=[os.path.abspath(p) for p in sys.path if p],
        device=device_type,
        num_threads=num_threads or max(1, usable_cpus() // (sizes["tp"] * sizes["pp"])),
    )
    executor: Any = ProcessExecutor(start_timeout_s=start_timeout_s, step_timeout_s=step_timeout_s)
    core = TaskEngine(spec, executor, batch_manager, pipe_size=pipe_size, queue_size=queue_size)
    return AsyncEngine(core, result_ttl_s=result_ttl_s, progress=progress)


def _one_of(name: str, short: int | None, long: int | None) -> int:
    if short is not None and long is not None and short != long:
        raise ConfigError(f"{name}={short} and {name}_world_size={long} are two names for one number: give one")
    return next((n for n in (short, long) if n is not None), 1)


def _check(
    sizes: dict[str, int],
    model_fn: Any,
    n_nodes: int,
    manager: Any,
    pipe_size: int,
    queue_size: int,
    device_type: str,
) -> None:
    problems = []
    for name, value in {**sizes, "pipe_size": pipe_size}.items():
        if not _is_int(value) or value < 1:
            problems.append(f"{name} must be an integer of at least 1, not {value!r}")
    if not problems and max(sizes.values()) > 1:
        problems.append("tp and pp above 1 do not work yet")
    if not _is_int(queue_size) or queue_size < 0:
        problems.append(f"queue_size must be an integer of at least 0 (no bound), not {queue_size!r}")
    if not callable(model_fn):
        problems.append(f"model_fn must be a function that builds the model, not {model_fn!r}")
    if n_nodes != 1:
        problems.append(f"n_nodes={n_nodes!r}: one machine only in this version")
    if device_type not in ("auto", "cpu", "cuda"):
        problems.append(f'device_type must be "auto", "cpu" or "cuda", not {device_type!r}')
    if manager is not None and not all(callable(getattr(manager, h, None)) for h in ("make_batch", "split_batch")):
        problems.append(f"batch_manager must have make_batch and split_batch, and {manager!r} has not")
    if problems:
        raise ConfigError(problems)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _pickled(model_fn: Any, arguments: dict[str, Any]) -> bytes:
    try:
        return payload.encode((model_fn, arguments))
    except Exception as error:
        raise ConfigError(f"model_fn or its arguments can not be sent to the workers: {error}") from error


class TaskThread(LoopThread):
    """Owns a `TaskEngine`."""

    instead = "await wait(uid) or the task's handle here"

    def __init__(self, engine: TaskEngine, progress: Callable[[StartPhase], None] | None) -> None:
        self.engine = engine
        super().__init__(engine, progress)


class AsyncEngine:
    """A model behind `submit` and `wait`; see `launch_engine`. All methods may be called from any thread.

    A uid is any hashable value. It is in use from `submit` until its result was read, by whatever way.
    """

    def __init__(
        self,
        engine: TaskEngine,
        *,
        result_ttl_s: float | None = 3600.0,
        progress: Callable[[StartPhase], None] | None = None,
    ) -> None:
        self._results = Results(result_ttl_s)
        self._thread = TaskThread(engine, progress)
        self._sigint = SigintHandler(self._thread.close)  # not self.shutdown: a cycle would delay the end

    def __repr__(self) -> str:
        return f"<AsyncEngine, {'closed' if self._thread.closed else 'open'}>"

    @property
    def thread(self) -> TaskThread:
        """The engine's thread, with its `loop` and `run(coro)`."""
        return self._thread

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return self._thread.engine.pids

    def submit(self, uid: Hashable, data: Any) -> TaskHandle:
        """Queue a task and return its handle at once.

        A tuple or list is the model's positional arguments, a dict its keywords, anything else its one argument; a
        batch manager may want other data.

        Raises:
            QueueFullError: `queue_size` tasks are outstanding.
            InvalidRequest: `uid` is in use, or not hashable.
            EngineClosed: the engine is closed.
        """
        handle = TaskHandle(self._thread, self._results, uid, data)
        handle.submit()
        return handle

    async def submit_async(self, uid: Hashable, data: Any) -> TaskHandle:
        """`submit` that waits for room, in the order of arrival, instead of raising QueueFullError."""
        handle = TaskHandle(self._thread, self._results, uid, data)
        handle.submit(wait=True)
        await handle.wait_for_room()
        return handle

    async def wait(self, uid: Hashable, timeout: float | None = None) -> Any:
        """The result of `uid`, on any asyncio, uvloop or trio loop. Cancelling the last one who waits ends the task.

        Raises:
            InvalidRequest: nobody submitted `uid`, or its result was read already.
            RequestTimeout: it is not there after `timeout` seconds; the task goes on.
            RequestFailed, WorkerError, RequestAborted, EngineClosed: there will be none.
        """
        return await self._results.find(uid).wait(timeout)

    def get(self, uid: Hashable, timeout: float | None = None, *, interval: float | None = None) -> Any:
        """`wait` for synchronous code. `interval` is EnergonAI's, and does nothing: there is no polling."""
        check_timeout(timeout)
        handle = self._results.find(uid)
        try:
            return handle.result(timeout)
        except TimeoutError:
            if handle.done():
                raise
            raise RequestTimeout(f"the task {uid!r} is not done after {timeout} s; it goes on") from None

    def as_completed(self, tasks: Iterable[TaskHandle | Hashable]) -> Completed:
        """Handles of `tasks` (handles or uids) in the order in which they end, for `for` and `async for`."""
        handles = [task if isinstance(task, TaskHandle) else self._results.find(task) for task in tasks]
        return Completed(handles, self._thread.portals)

    def cancel(self, uid: Hashable) -> bool:
        """End a task; False if it is done already. Raises InvalidRequest for an unknown uid."""
        return self._results.find(uid).cancel()

    def stats(self) -> TaskStats:
        """A picture of the engine at this moment."""
        return self._thread.engine.stats()

    def register_sigint(self) -> None:
        """Let the first Ctrl-C shut the engine down and raise KeyboardInterrupt; a second is as it was before.

        Raises InvalidRequest outside the main thread.
        """
        self._sigint.install()

    def shutdown(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Close the engine. Tasks that have not ended get EngineClosed.

        With `drain` they may finish first, for `timeout_s` at most. Results that are there can still be read.
        Idempotent. Raises BlockingCallError on the engine's own loop.
        """
        self._thread.close(drain=drain, timeout_s=timeout_s)
        self._sigint.restore()

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """`shutdown` for coroutines; their loop goes on meanwhile."""
        await self._thread.aclose(drain=drain, timeout_s=timeout_s)
        self._sigint.restore()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
