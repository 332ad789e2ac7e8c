"""The kinds of caller against each other: the same requests through coroutines, threads, futures and queues.

The opponent is the bridge that people write for lack of a better one: a coroutine per pair of queues that looks again
and again whether its queue is empty, on a loop that therefore never sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from corogen.adapters.bench import machine
from corogen.adapters.bench.figures import Timeline, summary_ms
from corogen.adapters.bench.workload import read_stream
from corogen.params import GenerationConfig

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

#: queue pairs of the queue adapter and of the polling bridge
PAIRS = 4


class Finished(NamedTuple):
    """One answered request: when, and the gaps between its pieces if it was streamed."""

    at: float
    tokens: int
    gaps: list[float]


def _streamed(line: Timeline) -> Finished:
    return Finished(line.arrivals[-1], line.total, line.gaps)


def _whole(response: Any) -> Finished:
    return Finished(time.perf_counter(), response.generate_token_len, [])


# -- the callers: each answers all prompts and returns when each was answered


def by_gather(pipe: Pipeline, prompts: Sequence[Any], config: GenerationConfig) -> list[Finished]:
    """One coroutine a request, all in one loop, each reading its stream."""

    async def everything() -> list[Finished]:
        read = await asyncio.gather(*(read_stream(pipe, prompt, config) for prompt in prompts))
        return [_streamed(line) for line, _ in read]

    return asyncio.run(everything())


def by_threads(pipe: Pipeline, prompts: Sequence[Any], config: GenerationConfig) -> list[Finished]:
    """One thread a request, each reading its stream with a `for` loop."""

    def read(prompt: Any) -> Finished:
        line = Timeline(time.perf_counter())
        for piece in pipe.stream_infer(prompt, gen_config=config):
            line.note(time.perf_counter(), len(piece.token_ids))
        return _streamed(line)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(read, prompts))


def by_futures(pipe: Pipeline, prompts: Sequence[Any], config: GenerationConfig) -> list[Finished]:
    """All requests as `concurrent.futures` futures from one thread; whole answers."""
    done: queue.SimpleQueue[Finished] = queue.SimpleQueue()
    for prompt in prompts:
        pipe.submit(prompt, gen_config=config).add_done_callback(lambda future: done.put(_whole(future.result())))
    return [done.get() for _ in prompts]


class Pairs:
    """Queue pairs, with prompts dealt out to them and answers read by one thread each."""

    def __init__(self, count: int) -> None:
        self.pairs: list[tuple[queue.Queue[Any], queue.Queue[Any]]] = [
            (queue.Queue(), queue.Queue()) for _ in range(count)
        ]

    def answer(self, prompts: Sequence[Any]) -> list[Finished]:
        """Put every prompt, wait for every answer. Raises what comes out instead of an answer."""
        count = len(self.pairs)
        shares = [prompts[i::count] for i in range(count)]

        def client(pair: tuple[queue.Queue[Any], queue.Queue[Any]], share: Sequence[Any]) -> list[Finished]:
            for prompt in share:
                pair[0].put(prompt)
            return [_whole_or_raise(pair[1].get()) for _ in share]

        with ThreadPoolExecutor(count) as pool:
            return [one for share in pool.map(client, self.pairs, shares) for one in share]


def _whole_or_raise(answer: Any) -> Finished:
    if isinstance(answer, BaseException):
        raise answer
    return _whole(answer)


@contextlib.contextmanager
def queue_adapter(pipe: Pipeline, config: GenerationConfig, pairs: int) -> Iterator[Pairs]:
    """The queue adapter with `pairs` pairs of queues."""
    from corogen.adapters.queues import QueueAdapter

    clients = Pairs(pairs)
    bridge = QueueAdapter(pipe, gen_config=config)
    try:
        for inbox, outbox in clients.pairs:
            bridge.add(inbox, outbox)
        yield clients
    finally:
        bridge.close()


@contextlib.contextmanager
def polling_bridge(pipe: Pipeline, config: GenerationConfig, pairs: int) -> Iterator[Pairs]:
    """What is measured against: a thread with a loop, and in it a coroutine for each pair that polls its queue."""
    clients = Pairs(pairs)
    loop = asyncio.new_event_loop()

    async def carry(inbox: queue.Queue[Any], outbox: queue.Queue[Any]) -> None:
        while True:
            if inbox.empty():
                await asyncio.sleep(0)
                continue
            prompt = inbox.get_nowait()
            try:
                outbox.put(await pipe.async_batch_infer(prompt, gen_config=config))
            except Exception as error:
                outbox.put(error)

    async def carry_all() -> None:
        await asyncio.gather(*(carry(*pair) for pair in clients.pairs))

    task: list[asyncio.Task[None]] = []

    def serve() -> None:
        asyncio.set_event_loop(loop)
        task.append(loop.create_task(carry_all()))
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task[0])
        loop.close()

    thread = threading.Thread(target=serve, name="polling-bridge")
    thread.start()
    try:
        yield clients
    finally:
        loop.call_soon_threadsafe(lambda: task[0].cancel())
        thread.join()


Caller = Callable[["Pipeline", Sequence[Any], GenerationConfig], list[Finished]]

_DIRECT: dict[str, Caller] = {"gather": by_gather, "threads": by_threads, "futures": by_futures}
_BRIDGES: dict[str, Callable[..., contextlib.AbstractContextManager[Pairs]]] = {
    "queue adapter": queue_adapter,
    "polling bridge": polling_bridge,
}


def measure(
    pipe: Pipeline,
    prompts: Sequence[Any],
    *,
    output_len: int,
    pairs: int | None = None,
    repeat: int = 1,
    idle_s: float = 10.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the same requests through every kind of caller, then watch processes and threads do nothing.

    Args:
        pairs: queue pairs of both bridges; None: one a request, which is the best case for the polling one.
        idle_s: seconds of each idle phase; 0: none.

    Returns:
        `callers`: one entry a kind and round; `idle`: one entry with the queue adapter open, one with the polling
        bridge open. JSON-ready.
    """
    config = GenerationConfig(max_new_tokens=output_len, ignore_eos=True)
    count = pairs or len(prompts)
    engine_thread = pipe.thread.run(_native_id())
    workers = machine.children()  # once: reading /proc takes seconds beside a thread that spins
    say("warm-up")
    by_gather(pipe, prompts, config)
    found: list[dict[str, Any]] = []
    idle: list[dict[str, Any]] = []
    for turn in range(repeat):
        for name, caller in _DIRECT.items():
            found.append({"caller": name, **_measured(workers, partial(caller, pipe, prompts, config))})
            say(_line(found[-1]))
        for name, bridge in _BRIDGES.items():
            with bridge(pipe, config, count) as clients:
                found.append({"caller": name, **_measured(workers, partial(clients.answer, prompts))})
                say(_line(found[-1]))
                if idle_s and turn == repeat - 1:
                    say(f"idle for {idle_s:g} s")
                    idle.append({"open": name, **idle_figures(workers, engine_thread, idle_s)})
    shape = {"requests": len(prompts), "output_len": output_len, "pairs": count, "rounds": repeat}
    return {**shape, "callers": found, "idle": idle}


async def _native_id() -> int:
    return threading.get_native_id()


def _measured(workers: Iterable[int], go: Callable[[], list[Finished]]) -> dict[str, Any]:
    before = {pid: machine.cpu_seconds(pid) or 0.0 for pid in workers}
    own, start = time.process_time(), time.perf_counter()
    done = go()
    wall, own = time.perf_counter() - start, time.process_time() - own
    worker_cpu = sum((machine.cpu_seconds(pid) or 0.0) - used for pid, used in before.items())
    gaps = [gap for one in done for gap in one.gaps]
    ends = [one.at - start for one in done]
    return {
        "wall_s": wall,
        "tok_per_s": sum(one.tokens for one in done) / wall,
        "itl_ms": summary_ms(gaps) if gaps else None,
        "completion_s": {"first": min(ends), "last": max(ends)},
        "process_cpu_s": own,
        "worker_cpu_s": worker_cpu,
    }


def _line(result: dict[str, Any]) -> str:
    return f"{result['caller']}: {result['wall_s']:.2f} s, {result['process_cpu_s']:.2f} s of CPU in this process"


def idle_figures(workers: Mapping[int, str], engine_thread: int, idle_s: float) -> dict[str, Any]:
    """CPU seconds of every process over `idle_s` seconds in which this thread sleeps, and the engine thread's wake-ups.

    Args:
        workers: the other processes, pid to name.
        engine_thread: native id of the engine's thread.
    """
    switches = machine.voluntary_switches(engine_thread)
    before = {pid: machine.cpu_seconds(pid) or 0.0 for pid in workers}
    own = time.process_time()
    time.sleep(idle_s)
    own = time.process_time() - own
    used = {f"{name} {pid}": (machine.cpu_seconds(pid) or 0.0) - before[pid] for pid, name in workers.items()}
    after = machine.voluntary_switches(engine_thread)
    return {
        "seconds": idle_s,
        "process_cpu_s": own,
        "worker_cpu_s": used,
        "engine_thread_switches": None if switches is None or after is None else after - switches,
    }
