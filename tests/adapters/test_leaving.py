"""Whoever leaves takes the request along: nothing runs, no block is used, no id is remembered afterwards.

`slowly()` checks that when it is left.
"""

import asyncio
import concurrent.futures
import gc
import signal
import threading

import pytest
import trio

from corogen.errors import EngineClosed
from tests.adapters.helpers import ENDLESS, LOOPS, SHORT, assert_nothing_runs, expected, make_pipe, slowly
from tests.conftest import eventually

pytestmark = pytest.mark.usefixtures("no_threads_left")

on_every_loop = pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS.keys())
on_asyncio_loops = pytest.mark.parametrize("run", [LOOPS["asyncio"], LOOPS["uvloop"]], ids=["asyncio", "uvloop"])


@pytest.mark.parametrize("prompts", ["one", ["one", "two", "three"]], ids=["single", "list"])
class TestAsyncStream:
    @on_every_loop
    def test_break(self, run, prompts):
        with slowly() as pipe:

            async def main():
                async for _ in pipe.async_stream_infer(prompts, ENDLESS):
                    break

            run(main())
            assert_nothing_runs(pipe)

    @on_every_loop
    def test_an_exception_in_the_body(self, run, prompts):
        with slowly() as pipe:

            async def main():
                async with pipe.async_stream_infer(prompts, ENDLESS) as pieces:
                    async for _ in pieces:
                        raise LookupError

            with pytest.raises(LookupError):
                run(main())
            assert_nothing_runs(pipe)

    @on_every_loop
    def test_aclose_twice_then_read_on(self, run, prompts):
        with slowly() as pipe:

            async def main():
                stream = pipe.async_stream_infer(prompts, ENDLESS)
                await anext(stream)
                await stream.aclose()
                await stream.aclose()
                rest = [piece async for piece in stream]
                assert {piece.finish_reason for piece in rest} <= {None, "abort"}
                await stream.aclose()

            run(main())

    @on_every_loop
    def test_dropping_the_last_reference(self, run, prompts):
        with slowly() as pipe:

            async def main():
                stream = pipe.async_stream_infer(prompts, ENDLESS)
                await anext(stream)
                del stream

            run(main())
            assert_nothing_runs(pipe)

    @on_asyncio_loops
    def test_cancelling_the_task(self, run, prompts):
        with slowly() as pipe:

            async def read():
                async for _ in pipe.async_stream_infer(prompts, ENDLESS):
                    pass

            async def main():
                task = asyncio.create_task(read())
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            run(main())
            assert_nothing_runs(pipe)

    def test_cancelling_a_trio_scope(self, prompts):
        with slowly() as pipe:

            async def main():
                with trio.move_on_after(0.01) as scope:
                    async for _ in pipe.async_stream_infer(prompts, ENDLESS):
                        pass
                assert scope.cancelled_caught

            trio.run(main)
            assert_nothing_runs(pipe)

    def test_closing_the_loop_of_a_reader_that_is_still_referenced(self, prompts):
        with slowly() as pipe:
            loop = asyncio.new_event_loop()

            async def first():
                stream = pipe.async_stream_infer(prompts, ENDLESS)
                await anext(stream)
                return stream

            stream = loop.run_until_complete(first())
            loop.close()
            assert_nothing_runs(pipe)
            del stream

    def test_a_trio_run_that_ends(self, prompts):
        with slowly() as pipe:

            async def first():
                stream = pipe.async_stream_infer(prompts, ENDLESS)
                await anext(stream)
                return stream

            stream = trio.run(first)
            assert_nothing_runs(pipe)
            del stream

    def test_on_the_engines_own_loop(self, prompts):
        with slowly() as pipe:

            async def main():
                async for _ in pipe.async_stream_infer(prompts, ENDLESS):
                    break

            pipe.thread.run(main())
            assert_nothing_runs(pipe)


class TestAwaiting:
    @on_asyncio_loops
    @pytest.mark.parametrize("prompts", ["one", ["one", "two"], "long " * 2000], ids=["single", "list", "long"])
    def test_a_cancelled_task_wherever_it_waits(self, run, prompts):
        with slowly() as pipe:

            async def main():
                tasks = [asyncio.create_task(pipe.async_batch_infer(prompts, ENDLESS)) for _ in range(8)]
                for turns, task in enumerate(tasks):
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(r, asyncio.CancelledError) for r in results)
                assert (await pipe.async_batch_infer("alive", SHORT)).text == expected("alive")

            run(main())
            assert_nothing_runs(pipe)

    def test_a_task_that_is_cancelled_while_a_thread_prepares_its_prompt(self, monkeypatch):
        with slowly() as pipe:
            admission = type(pipe.engine.admission)
            prepare, begun, go_on = admission.prepare, threading.Event(), threading.Event()

            def slow(self, *args, **options):
                begun.set()
                assert go_on.wait(5)
                return prepare(self, *args, **options)

            monkeypatch.setattr(admission, "prepare", slow)

            async def main():
                task = asyncio.create_task(pipe.async_batch_infer("long " * 2000, ENDLESS))
                await asyncio.to_thread(begun.wait, 5)
                task.cancel()
                await asyncio.wait([task])
                go_on.set()

            asyncio.run(main())
            assert eventually(lambda: pipe.stats().ended.get("abort") == 1)
            assert_nothing_runs(pipe)

    def test_a_timeout(self):
        with slowly() as pipe:

            async def main():
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await pipe.async_batch_infer("endless", ENDLESS)

            asyncio.run(main())

    def test_a_failing_neighbour_in_a_task_group(self):
        with slowly() as pipe:

            async def fail():
                await asyncio.sleep(0.005)
                raise LookupError

            async def main():
                async with asyncio.TaskGroup() as group:
                    group.create_task(pipe.async_batch_infer("endless", ENDLESS))
                    group.create_task(fail())

            with pytest.raises(ExceptionGroup):
                asyncio.run(main())

    def test_a_coroutine_that_is_dropped_before_it_began(self):
        with slowly() as pipe:
            pipe.async_batch_infer("never", ENDLESS).close()
            assert pipe.stats().steps == 0


class TestThreads:
    def test_break_exception_close_and_del(self):
        with slowly() as pipe:
            for _ in pipe.stream_infer(["a", "b"], ENDLESS):
                break
            assert_nothing_runs(pipe)
            with pytest.raises(LookupError), pipe.stream_infer("x", ENDLESS) as stream:
                raise LookupError
            assert_nothing_runs(pipe)
            stream = pipe.stream_infer("x", ENDLESS)
            next(stream)
            stream.close()
            stream.close()
            assert list(stream)[-1].finish_reason == "abort"
            stream = pipe.stream_infer("x", ENDLESS)
            del stream
            assert_nothing_runs(pipe)

    def test_close_from_another_thread_ends_the_reader(self):
        with slowly() as pipe:
            stream = pipe.stream_infer("x", ENDLESS)
            reader = concurrent.futures.ThreadPoolExecutor(1)
            pieces = reader.submit(list, stream)
            assert not pieces.done()
            stream.close()
            assert pieces.result(5)[-1].finish_reason == "abort"
            reader.shutdown()

    def test_a_stream_in_a_cycle_that_the_collector_finds(self):
        with slowly() as pipe:

            class Holder:
                pass

            holder = Holder()
            holder.itself, holder.stream = holder, pipe.stream_infer("x", ENDLESS)
            del holder
            gc.collect()
            assert_nothing_runs(pipe)

    @pytest.mark.parametrize("how", ["infer", "stream"])
    def test_ctrl_c_in_a_blocking_call(self, how):
        with slowly() as pipe:

            def interrupt():
                eventually(lambda: pipe.stats().running)
                signal.pthread_kill(main, signal.SIGINT)

            main = threading.get_ident()
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                pipe.infer(["a", "b"], ENDLESS) if how == "infer" else list(pipe.stream_infer("a", ENDLESS))
            thread.join()
            assert_nothing_runs(pipe)


class TestFutures:
    def test_cancel_ends_the_request_also_when_it_runs(self):
        with slowly() as pipe:
            future = pipe.submit("endless", ENDLESS)
            assert eventually(lambda: pipe.stats().running)
            assert future.running()
            assert future.cancel()
            assert future.cancel()
            assert future.cancelled()
            assert not future.running()
            assert_nothing_runs(pipe)
            with pytest.raises(concurrent.futures.CancelledError):
                future.result()

    def test_a_done_future_can_not_be_cancelled(self):
        with slowly() as pipe:
            future = pipe.submit("x", SHORT)
            assert future.result(5).text == expected("x")
            assert not future.cancel()
            assert future.result().text == expected("x")

    def test_waiters_hear_of_a_cancel(self):
        with slowly() as pipe:
            futures = [pipe.submit("endless", ENDLESS) for _ in range(4)]
            for future in futures:
                threading.Timer(0.005, future.cancel).start()
            done, _ = concurrent.futures.wait(futures, timeout=5)
            assert len(done) == 4

    def test_cancelling_from_many_threads_while_they_finish(self):
        with slowly() as pipe, concurrent.futures.ThreadPoolExecutor(4) as threads:
            futures = [pipe.submit(f"p{i}", SHORT) for i in range(100)]
            list(threads.map(lambda future: future.cancel(), futures * 4))
            for future in futures:
                assert future.done()

    def test_wrapped_for_asyncio(self):
        with slowly() as pipe:

            async def main():
                answer = await asyncio.wrap_future(pipe.submit("x", SHORT))
                endless = asyncio.wrap_future(pipe.submit("x", ENDLESS))
                await asyncio.sleep(0)
                endless.cancel()
                return answer

            assert asyncio.run(main()).text == expected("x")


class TestClosing:
    def test_answers_every_waiter(self):
        pipe = make_pipe(fake={"step_time_s": 30.0})
        waiting = [
            lambda: pipe.infer("x"),
            lambda: pipe.infer(["x", "y"]),
            lambda: list(pipe.stream_infer("x")),
            lambda: pipe.submit("x").result(),
            lambda: pipe.submit(["x", "y"]).result(),
            *(lambda run=run: run(pipe.async_batch_infer("x")) for run in LOOPS.values()),
            lambda: pipe.thread.run(pipe.async_batch_infer("x")),
        ]
        with concurrent.futures.ThreadPoolExecutor(len(waiting)) as threads:
            answers = [threads.submit(call) for call in waiting]
            assert eventually(lambda: len(pipe.engine.request_ids()) == len(waiting) + 2)
            closers = [threading.Thread(target=pipe.close) for _ in range(4)]
            for closer in closers:
                closer.start()
            for answer in answers:
                assert isinstance(answer.exception(10), EngineClosed)
            for closer in closers:
                closer.join()

    def test_lets_requests_finish_with_drain_and_takes_no_new_ones(self):
        pipe = make_pipe(fake={"step_time_s": 0.001})
        future = pipe.submit("x", SHORT)
        pipe.close(drain=True, timeout_s=10)
        assert future.result(0).text == expected("x")

    def test_gives_up_draining_after_its_time(self):
        pipe = make_pipe(fake={"step_time_s": 30.0})
        future = pipe.submit("x", SHORT)
        pipe.close(drain=True, timeout_s=0.01)
        assert isinstance(future.exception(0), EngineClosed)

    @on_every_loop
    def test_async_with_closes_without_holding_up_the_loop(self, run):
        async def main():
            async with make_pipe() as pipe:
                assert (await pipe.async_batch_infer("x", SHORT)).text == expected("x")
            await pipe.aclose()
            with pytest.raises(EngineClosed):
                await pipe.async_batch_infer("x", SHORT)
            return pipe

        assert run(main()).thread.closed

    def test_races_with_submitting_threads_and_nobody_hangs(self):
        for _ in range(20):
            pipe = make_pipe()
            start = threading.Barrier(5)

            def caller(pipe=pipe, start=start):
                start.wait()
                try:
                    while True:
                        pipe.infer("x", SHORT)
                except EngineClosed:
                    pass

            callers = [threading.Thread(target=caller) for _ in range(4)]
            for thread in callers:
                thread.start()
            start.wait()
            pipe.close()
            for thread in callers:
                thread.join(5)
                assert not thread.is_alive()

    def test_dropping_the_last_reference_closes(self):
        pipe = make_pipe()
        stream = pipe.stream_infer("x", SHORT)
        del pipe
        assert stream.__next__(), "a stream keeps its engine"
        del stream

    def test_a_future_keeps_its_engine(self):
        assert make_pipe().submit("x", SHORT).result(5).text == expected("x")
        gc.collect()
