"""submit, wait, get: what callers rely on. No model runs here; see test_processes for that."""

import asyncio
import concurrent.futures
import gc
import threading
import time
import weakref
from pathlib import Path

import pytest

from corogen.adapters.bench.machine import voluntary_switches
from corogen.adapters.tasks import AsyncEngine
from corogen.errors import (
    BlockingCallError,
    EngineClosed,
    InvalidRequest,
    QueueFullError,
    RequestAborted,
    RequestTimeout,
)
from corogen.tasks.engine import TaskEngine
from corogen.wire.messages import TaskSpec
from tests.adapters.helpers import LOOPS
from tests.conftest import eventually
from tests.tasks.helpers import FakeTaskExecutor, Lists, close_gate, open_gate, scripted

every_loop = pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS)


def double(x):
    return 2 * x


@every_loop
def test_a_task_is_waited_for_by_uid_or_by_handle_on_any_loop(run):
    async def main():
        engine.submit("a", 1)
        handle = engine.submit(("b", 2), 2)
        return await engine.wait("a"), await handle

    with scripted(double) as engine:
        assert run(main()) == (2, 4)


def test_every_way_to_call_a_model():
    def model(*args, **named):
        return args, named

    with scripted(model) as engine:
        data = {"tuple": (1, 2), "list": [1, 2], "dict": {"x": 1}, "text": "ab", "none": None}
        for uid, value in data.items():
            engine.submit(uid, value)
        results = {uid: engine.get(uid) for uid in data}
    assert results == {
        "tuple": ((1, 2), {}),
        "list": ((1, 2), {}),
        "dict": ((), {"x": 1}),
        "text": (("ab",), {}),
        "none": ((None,), {}),
    }


def test_many_threads_and_loops_share_an_engine():
    def caller(number):
        async def main():
            handles = [engine.submit((number, i), i) for i in range(50)]
            return [await handle for handle in handles]

        if number % 2:
            return asyncio.run(main())
        for i in range(50):
            engine.submit((number, i), i)
        return [engine.get((number, i)) for i in range(50)]

    with scripted(lambda xs: [2 * x for x in xs], Lists(8)) as engine:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(caller, range(8)))
        assert answers == [[2 * i for i in range(50)]] * 8
        assert engine.stats().ended == {"done": 400}


def test_a_handle_is_a_future():
    with scripted(double) as engine:
        handles = [engine.submit(i, i) for i in range(5)]
        done, pending = concurrent.futures.wait(handles, timeout=10)
        assert not pending
        assert sorted(h.result() for h in done) == [0, 2, 4, 6, 8]
        called = threading.Event()
        handle = engine.submit("x", 1)
        handle.add_done_callback(lambda h: called.set())
        assert called.wait(10)
        assert handle.exception() is None


# ------------------------------------------------------------------ uids


def test_a_uid_is_in_use_until_its_result_was_read():
    with scripted(double) as engine:
        close_gate(engine)
        engine.submit("a", 1)
        with pytest.raises(InvalidRequest, match="uid 'a' is in use"):
            engine.submit("a", 2)
        open_gate(engine)
        assert eventually(lambda: engine.stats().ended == {"done": 1})
        with pytest.raises(InvalidRequest, match="in use"):
            engine.submit("a", 2)
        assert engine.get("a") == 2
        with pytest.raises(InvalidRequest, match="no task with the uid 'a'"):
            engine.get("a")
        engine.submit("a", 5)
        assert engine.get("a") == 10


async def test_an_unknown_uid_raises_at_once():
    with scripted() as engine:
        with pytest.raises(InvalidRequest, match="never submitted"):
            await engine.wait("nobody")
        with pytest.raises(InvalidRequest, match="never submitted"):
            engine.get(["not", "hashable"])
        with pytest.raises(InvalidRequest, match="must be hashable"):
            engine.submit([1], 1)
        with pytest.raises(InvalidRequest, match="nobody"):
            engine.cancel("nobody")


async def test_reading_through_the_handle_frees_the_uid():
    with scripted(double) as engine:
        handle = engine.submit("a", 1)
        assert await handle == 2
        assert await handle == 2  # a handle can be read again
        engine.submit("a", 2)
        assert await engine.wait("a") == 4


def test_a_late_wait_finds_the_result_until_it_is_dropped():
    with scripted(double, result_ttl_s=0.2) as engine:
        engine.submit("a", 1)
        kept = engine.submit("b", 2)
        assert eventually(lambda: engine.stats().ended == {"done": 2})
        assert engine.get("a") == 2
        assert eventually(lambda: not engine._results._handles)
        with pytest.raises(InvalidRequest, match=r"result_ttl_s=0\.2"):
            engine.get("b")
        assert kept.result() == 4
        engine.submit("b", 3)  # the timer goes on
        assert eventually(lambda: engine.stats().ended == {"done": 3})
        assert eventually(lambda: not engine._results._handles)


def test_a_read_result_is_kept_by_nobody():
    class Thing:
        pass

    with scripted(lambda x: Thing()) as engine:
        engine.submit("a", 1)
        result = weakref.ref(engine.get("a"))
        gc.collect()
        assert eventually(lambda: gc.collect() or result() is None)


async def test_two_may_wait_for_one_task():
    with scripted(double) as engine:
        close_gate(engine)
        engine.submit("a", 1)
        waiters = [asyncio.create_task(engine.wait("a")) for _ in range(2)]
        await asyncio.sleep(0.01)
        waiters[0].cancel()
        await asyncio.sleep(0.01)
        open_gate(engine)
        assert await waiters[1] == 2
        assert waiters[0].cancelled()


# ------------------------------------------------------------------ leaving


@every_loop
def test_a_timeout_leaves_the_task_alone(run):
    async def main():
        with pytest.raises(RequestTimeout, match=r"'a' is not done after 0\.01 s"):
            await engine.wait("a", timeout=0.01)
        with pytest.raises(TimeoutError):
            await handle.wait(timeout=0)
        open_gate(engine)
        return await engine.wait("a", timeout=30)

    with scripted(double) as engine:
        close_gate(engine)
        handle = engine.submit("a", 1)
        with pytest.raises(RequestTimeout):
            engine.get("a", 0.01)
        assert run(main()) == 2


async def test_who_stops_waiting_ends_the_task():
    with scripted(double) as engine:
        close_gate(engine)
        engine.submit("at the worker", 1)
        engine.submit("there too", 1)
        engine.submit("queued", 1)
        assert eventually(lambda: engine.stats().waiting == 1)
        waiters = [asyncio.create_task(engine.wait(uid)) for uid in ("at the worker", "queued")]
        await asyncio.sleep(0.01)
        for waiter in waiters:
            waiter.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*waiters, return_exceptions=True)
        )
        assert eventually(lambda: engine.stats().ended == {"cancelled": 2})
        assert engine.stats().waiting == 0
        again = engine.submit("queued", 5)
        open_gate(engine)
        assert await again == 10
        assert engine.executor.inputs == [1, 1, 5]


def test_cancel_by_uid_and_by_handle():
    with scripted(double) as engine:
        close_gate(engine)
        one, two = engine.submit("a", 1), engine.submit("b", 2)
        assert engine.cancel("a")
        assert two.cancel()
        assert two.cancel()
        assert one.cancelled()
        assert not one.running()
        with pytest.raises(concurrent.futures.CancelledError):
            one.result()
        with pytest.raises(RequestAborted):
            asyncio.run(two.wait())
        engine.submit("a", 3)
        open_gate(engine)
        assert engine.get("a") == 6
        done = engine.submit("c", 1)
        assert done.result() == 2
        assert not done.cancel()


# ------------------------------------------------------------------ bounds


def test_a_full_queue_refuses_and_bounds_everything_outstanding():
    with scripted(double, queue_size=3) as engine:
        close_gate(engine)
        for i in range(3):
            engine.submit(i, i)
        with pytest.raises(QueueFullError, match="3 tasks are outstanding and queue_size is 3") as caught:
            engine.submit(3, 3)
        assert (caught.value.outstanding, caught.value.limit) == (3, 3)
        open_gate(engine)
        assert [engine.get(i) for i in range(3)] == [0, 2, 4]
        engine.submit(3, 3)  # the refused uid is free
        assert engine.get(3) == 6


@every_loop
def test_submit_async_waits_for_room_in_order(run):
    import anyio

    async def main():
        entered = []

        async def put(uid):
            handle = await engine.submit_async(uid, uid)
            entered.append(uid)
            assert await handle == 2 * uid

        await engine.submit_async(0, 0)
        async with anyio.create_task_group() as group:
            for uid in range(1, 5):
                group.start_soon(put, uid)
                await anyio.sleep(0.01)
            assert entered == []
            with pytest.raises(QueueFullError):
                engine.submit(9, 9)
            open_gate(engine)

    with scripted(double, queue_size=1) as engine:
        close_gate(engine)
        run(main())
        assert engine.get(0) == 0
        assert engine.executor.inputs == [0, 1, 2, 3, 4]


async def test_who_gives_up_waiting_for_room_leaves_no_trace():
    with scripted(double, queue_size=1) as engine:
        close_gate(engine)
        engine.submit("a", 1)
        waiting = asyncio.create_task(engine.submit_async("b", 2))
        behind = asyncio.create_task(engine.submit_async("c", 3))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        open_gate(engine)
        assert await (await behind) == 6
        assert engine.executor.inputs == [1, 3]
        engine.submit("b", 2)
        assert await engine.wait("b") == 4


async def test_who_waits_for_room_hears_of_the_close():
    with scripted(double, queue_size=1) as engine:
        close_gate(engine)
        handle = engine.submit("a", 1)
        waiting = asyncio.create_task(engine.submit_async("b", 2))
        await asyncio.sleep(0.02)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await waiting
        with pytest.raises(EngineClosed):
            await handle


# ------------------------------------------------------------------ the end


def test_shutdown_fails_what_has_not_ended_and_keeps_what_has():
    with scripted(double) as engine:
        engine.submit("done", 1)
        assert eventually(lambda: engine.stats().ended == {"done": 1})
        close_gate(engine)
        for i in range(5):
            engine.submit(i, i)
        engine.shutdown()
        engine.shutdown()
        for i in range(5):
            with pytest.raises(EngineClosed, match="closed before the result"):
                engine.get(i)
        assert engine.get("done") == 2
        with pytest.raises(EngineClosed):
            engine.submit("late", 1)
        with pytest.raises(InvalidRequest):
            engine.get("late")


def test_shutdown_may_drain():
    with scripted(double) as engine:
        close_gate(engine)
        handles = [engine.submit(i, i) for i in range(5)]
        threading.Timer(0.05, open_gate, [engine]).start()
        engine.shutdown(drain=True, timeout_s=30)
        assert [h.result() for h in handles] == [0, 2, 4, 6, 8]


def test_a_drain_has_an_end():
    with scripted(double) as engine:
        close_gate(engine)
        handle = engine.submit(1, 1)
        engine.shutdown(drain=True, timeout_s=0.05)
        with pytest.raises(EngineClosed):
            handle.result()


async def test_async_with_closes():
    with scripted(double) as engine:
        async with engine:
            engine.submit(1, 1)
            assert await engine.wait(1) == 2
        assert "closed" in repr(engine)


def test_a_dropped_engine_closes(no_threads_left):
    engine = AsyncEngine(TaskEngine(TaskSpec(b"", []), FakeTaskExecutor(double)))
    handle = engine.submit("somebody reads this one", 1)
    assert engine.get("somebody reads this one") == 2
    engine.submit("nobody reads this one", 1)
    gc.disable()  # nothing of it is left to the collector
    del engine, handle
    assert eventually(lambda: not any(t.name == "corogen-engine" for t in threading.enumerate()))
    gc.enable()


def test_blocking_on_the_engines_own_loop_is_refused():
    with scripted(double) as engine:
        close_gate(engine)
        handle = engine.submit(1, 1)

        async def on_the_loop():
            for blocking in (lambda: engine.get(1), handle.result, handle.exception, engine.shutdown):
                with pytest.raises(BlockingCallError, match="await wait"):
                    blocking()
            open_gate(engine)
            return await engine.wait(1)

        assert engine.thread.run(on_the_loop()) == 2


# ------------------------------------------------------------------ as_completed, figures


@every_loop
def test_as_completed_gives_handles_in_the_order_of_their_ends(run):
    async def main():
        found = engine.as_completed([engine.submit("x", 1), "y"])
        return [(handle.uid, await handle) async for handle in found]

    with scripted(double) as engine:
        engine.submit("y", 2)
        assert sorted(run(main())) == [("x", 2), ("y", 4)]
        handles = [engine.submit(i, i) for i in range(20)]
        assert sorted(h.result() for h in engine.as_completed(handles)) == [2 * i for i in range(20)]


def test_batch_size_and_time_are_logged_and_counted(caplog):
    with caplog.at_level("INFO", "corogen.tasks"), scripted(lambda xs: xs, Lists(4)) as engine:
        close_gate(engine)
        handles = [engine.submit(i, i) for i in range(9)]
        open_gate(engine)
        for handle in handles:
            handle.result()
        stats = engine.stats()
    sizes = [record.batch_size for record in caplog.records if hasattr(record, "batch_size")]
    assert sum(sizes) == stats.batched_tasks == 9
    assert len(sizes) == stats.batches == stats.batch_time.count < 9
    assert stats.queue_time.count == 9
    assert any("batch size: 4, time:" in record.message for record in caplog.records)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counted in /proc")
def test_the_engine_sleeps_while_there_is_nothing_to_do():
    with scripted(double) as engine:
        engine.submit(1, 1)
        engine.get(1)
        thread = engine.thread._thread.native_id
        before = voluntary_switches(thread)
        time.sleep(0.3)
        assert voluntary_switches(thread) - before <= 1
