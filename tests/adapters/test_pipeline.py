"""Every way to call a pipeline gives the same answers and the same errors."""

import asyncio
import os
import queue
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio
import trio.testing
import uvloop

from corogen.adapters.queues import QueueAdapter
from corogen.config import EngineConfig
from corogen.errors import (
    BlockingCallError,
    ConfigError,
    CorogenError,
    EmptyPrompt,
    EngineClosed,
    InvalidRequest,
    QueueFullError,
    StepFailed,
    WorkerDied,
)
from corogen.outputs import Response
from corogen.params import GenerationConfig
from tests.adapters.helpers import ENDLESS, LOOPS, SHORT, expected, make_pipe, scripted, slowly

pytestmark = pytest.mark.usefixtures("no_threads_left")


def joined(pieces):
    """The answers that the pieces of a stream add up to, by index."""
    answers = {}
    for piece in pieces:
        answers.setdefault(piece.index, Response(index=piece.index)).extend(piece)
    return answers


def by_infer(pipe, prompts, config):
    return pipe.infer(prompts, config)


def by_stream(pipe, prompts, config):
    answers = joined(pipe.stream_infer(prompts, config))
    return [answers[i] for i in range(len(prompts))] if isinstance(prompts, list) else answers[0]


def by_future(pipe, prompts, config):
    return pipe.submit(prompts, config).result()


def by_queue(pipe, prompts, config):
    if not isinstance(config, GenerationConfig | None):
        pytest.skip("an item of a queue has one config")
    inbox, outbox = queue.Queue(), queue.Queue()
    with QueueAdapter(pipe) as bridge:
        bridge.add(inbox, outbox)
        inbox.put((prompts, config))
        answer = outbox.get()
    if isinstance(answer, Exception):
        raise answer
    return answer


def by_coroutine(run):
    return lambda pipe, prompts, config: run(pipe.async_batch_infer(prompts, config))


def by_async_stream(run):
    async def read(pipe, prompts, config):
        answers = joined([piece async for piece in pipe.async_stream_infer(prompts, config)])
        return [answers[i] for i in range(len(prompts))] if isinstance(prompts, list) else answers[0]

    return lambda pipe, prompts, config: run(read(pipe, prompts, config))


def on_own_loop(pipe, prompts, config):
    return pipe.thread.run(pipe.async_batch_infer(prompts, config))


def stream_on_own_loop(pipe, prompts, config):
    return by_async_stream(pipe.thread.run)(pipe, prompts, config)


CALLERS = {
    "infer": by_infer,
    "stream": by_stream,
    "future": by_future,
    "queue": by_queue,
    "own loop": on_own_loop,
    "stream on own loop": stream_on_own_loop,
    **{f"await on {name}": by_coroutine(run) for name, run in LOOPS.items()},
    **{f"stream on {name}": by_async_stream(run) for name, run in LOOPS.items()},
}

every_caller = pytest.mark.parametrize("call", CALLERS.values(), ids=CALLERS.keys())
on_every_loop = pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS.keys())


class TestEveryCaller:
    @every_caller
    def test_gets_the_same_answer(self, call):
        with scripted() as pipe:
            answer = call(pipe, "你好 café", SHORT)
            reference = pipe.infer("你好 café", SHORT)
            answer.cached_tokens = reference.cached_tokens
            assert answer == reference
            assert (answer.finish_reason, answer.generate_token_len, answer.index) == ("length", 12, 0)

    @every_caller
    def test_gets_a_list_in_order_with_bad_items_in_their_place(self, call):
        with scripted() as pipe:
            prompts = ["one", "", "three", [99999], "x" * 5000, "five"]
            answers = call(pipe, prompts, SHORT)
            assert [a.index for a in answers] == list(range(6))
            assert [a.text for a in answers] == [expected("one"), "", expected("three"), "", "", expected("five")]
            assert [a.error_code for a in answers] == [
                None,
                "empty_prompt",
                None,
                "token_out_of_range",
                "context_length_exceeded",
                None,
            ]
            assert answers[1].finish_reason == "error"
            assert "tokens" in answers[4].error_message

    @every_caller
    def test_gets_one_config_for_each_prompt(self, call):
        with scripted() as pipe:
            configs = [GenerationConfig(max_new_tokens=n) for n in (3, 1, 7)]
            assert [a.generate_token_len for a in call(pipe, ["a", "b", "c"], configs)] == [3, 1, 7]

    @every_caller
    def test_gets_the_error_of_a_single_prompt(self, call):
        with scripted() as pipe, pytest.raises(EmptyPrompt):
            call(pipe, "", SHORT)

    @every_caller
    def test_gets_the_error_of_a_long_prompt(self, call):
        with scripted() as pipe, pytest.raises(InvalidRequest, match="20000"):
            call(pipe, "x" * 20_000, SHORT)

    @every_caller
    def test_gets_what_ended_a_request_in_the_engine(self, call):
        with scripted(fake={"fail_at": {3: RuntimeError("boom")}}, on_worker_failure="fail") as pipe:
            with pytest.raises(StepFailed, match="boom"):
                call(pipe, "x", SHORT)
            assert call(pipe, "again", SHORT).text == expected("again")

    @every_caller
    def test_gets_the_same_answer_when_a_worker_dies_on_the_way(self, call):
        with make_pipe(fake={"fail_at": {3: WorkerDied(0, -9, "Killed")}}) as pipe:
            assert call(pipe, "x", SHORT).text == expected("x")

    @every_caller
    def test_gets_the_death_of_the_worker_if_that_is_wanted(self, call):
        with make_pipe(fake={"fail_at": {3: WorkerDied(0, -9, "Killed")}}, on_worker_failure="fail") as pipe:
            with pytest.raises(WorkerDied, match="signal 9"):
                call(pipe, "x", SHORT)
            assert call(pipe, "again", SHORT).text == expected("again")

    @every_caller
    def test_gets_an_error_after_close(self, call):
        pipe = make_pipe()
        pipe.close()
        with pytest.raises((EngineClosed, BlockingCallError)):
            call(pipe, "x", SHORT)
        with pytest.raises((EngineClosed, BlockingCallError)):
            call(pipe, ["x", "y"], SHORT)

    @every_caller
    def test_gets_nothing_for_nothing(self, call):
        with scripted() as pipe:
            assert call(pipe, [], SHORT) == []

    @every_caller
    def test_can_send_two_hundred_at_once(self, call):
        with scripted(max_batch_size=16) as pipe:
            prompts = [f"prompt number {i}" for i in range(200)]
            answers = call(pipe, prompts, SHORT)
            assert [a.text for a in answers] == list(map(expected, prompts))
            assert max(record.running for record in pipe.step_log(4096)) == 16


def test_one_caller_of_each_kind_at_the_same_time():
    with slowly() as pipe, ThreadPoolExecutor(24) as threads:
        jobs = [(name, call, f"{name} {i}") for i in range(2) for name, call in CALLERS.items()]
        start = threading.Barrier(len(jobs) if len(jobs) < 24 else 24)

        def job(one):
            _, call, prompt = one
            start.wait(10)
            return [call(pipe, f"{prompt} {turn}", SHORT).text for turn in range(5)]

        for (_, _, prompt), texts in zip(jobs, threads.map(job, jobs), strict=True):
            assert texts == [expected(f"{prompt} {turn}") for turn in range(5)]


def test_loops_of_all_kinds_threads_and_queues_in_one_process():
    """One asyncio thread, one uvloop thread, one trio thread, eight synchronous ones, two pairs of queues."""
    with slowly() as pipe:
        done = queue.SimpleQueue()

        async def gathered(name):
            return [
                a.text for a in await asyncio.gather(*(pipe.async_batch_infer(f"{name}{i}", SHORT) for i in range(8)))
            ]

        async def nursery(name):
            texts = {}

            async def one(i):
                texts[i] = (await pipe.async_batch_infer(f"{name}{i}", SHORT)).text

            async with trio.open_nursery() as tasks:
                for i in range(8):
                    tasks.start_soon(one, i)
            return [texts[i] for i in range(8)]

        def caller(name, work):
            def go():
                try:
                    done.put((name, work(name)))
                except BaseException as error:
                    done.put((name, error))

            return threading.Thread(target=go)

        work = {
            "asyncio": lambda name: asyncio.run(gathered(name), debug=True),
            "uvloop": lambda name: uvloop.run(gathered(name)),
            "trio": lambda name: trio.run(nursery, name),
            **{f"sync{n} ": lambda name: [pipe.infer(f"{name}{i}", SHORT).text for i in range(8)] for n in range(8)},
        }
        callers = [caller(*one) for one in work.items()]
        pairs = [(queue.Queue(), queue.Queue()) for _ in range(2)]
        with QueueAdapter(pipe, SHORT) as bridge:
            for pair in pairs:
                bridge.add(*pair)
            for thread in callers:
                thread.start()
            for n, (inbox, _) in enumerate(pairs):
                for i in range(8):
                    inbox.put(f"pair{n} {i}")
            for n, (_, outbox) in enumerate(pairs):
                assert [outbox.get().text for _ in range(8)] == [expected(f"pair{n} {i}") for i in range(8)]
            for thread in callers:
                thread.join()
        answers = dict(done.get() for _ in callers)
        assert answers == {name: [expected(f"{name}{i}") for i in range(8)] for name in work}


class TestFaultsOfACall:
    @pytest.mark.parametrize(
        ("prompts", "config", "message"),
        [
            (["a", "b"], [SHORT], "list of 1 for 2 prompts"),
            ("a", [SHORT, SHORT], "list of 2 for 1 prompt:"),
            (["a"], {"max_new_tokens": 3}, "gen_config must be a GenerationConfig"),
            (["a"], ["b"], r"gen_config\[0\]"),
            (42, None, "not an int"),
            (None, None, "not a NoneType"),
            (["a", 5], None, "item 1"),
            ({"role": "user", "content": "x"}, None, "put the message into a list"),
            (iter(["a"]), None, "list_iterator"),
        ],
    )
    @every_caller
    def test_raise_before_any_work(self, call, prompts, config, message):
        with scripted() as pipe:
            with pytest.raises(InvalidRequest, match=message):
                call(pipe, prompts, config)
            assert pipe.stats().steps == 0

    def test_name_the_value(self):
        with scripted() as pipe:
            with pytest.raises(InvalidRequest, match="do_preprocess"):
                pipe.infer("a", SHORT, do_preprocess="no")
            with pytest.raises(InvalidRequest, match="request_id"):
                pipe.infer(["a", "b"], request_id="same")
            with pytest.raises(InvalidRequest, match="list of 1 for 2"):
                pipe.infer(["a", "b"], request_id=["x"])
            with pytest.raises(InvalidRequest, match="'x' is in use"):
                first = pipe.submit("a", ENDLESS, request_id="x")
                pipe.infer("a", request_id="x")
            first.cancel()

    def test_a_coroutine_without_a_loop_is_told_what_to_use(self):
        with scripted() as pipe:
            with pytest.raises(InvalidRequest, match="stream_infer or submit"):
                pipe.async_stream_infer("x")
            coro = pipe.async_batch_infer("x")
            with pytest.raises(InvalidRequest, match="no running asyncio or trio"):
                coro.send(None)


class TestAFullQueue:
    def test_refuses_a_single_prompt(self):
        with slowly(queue_size=1) as pipe, pipe.stream_infer("first", ENDLESS):
            with pytest.raises(QueueFullError) as caught:
                pipe.infer("second")
            assert (caught.value.outstanding, caught.value.limit) == (1, 1)
            with pytest.raises(QueueFullError):
                pipe.submit("second")

    @every_caller
    def test_refuses_single_items_of_a_list(self, call):
        with slowly(queue_size=3) as pipe:
            answers = call(pipe, list("abcde"), SHORT)
            if call is by_queue:  # what feeds it waits instead
                assert [a.text for a in answers] == [expected(p) for p in "abcde"]
                return
            assert [a.error_code for a in answers] == [None] * 3 + ["queue_full"] * 2
            assert [a.text for a in answers[:3]] == [expected(p) for p in "abc"]

    def test_lets_those_wait_who_want_to(self):
        prompts = list("abcdefgh")
        texts = [expected(p) for p in prompts]
        with scripted(queue_size=2) as pipe:
            assert [a.text for a in pipe.infer(prompts, SHORT, when_full="wait")] == texts
            assert [a.text for a in pipe.submit(prompts, SHORT, when_full="wait").result(10)] == texts
            assert [a.text for a in asyncio.run(pipe.async_batch_infer(prompts, SHORT, when_full="wait"))] == texts
            assert "".join(p.text for p in pipe.stream_infer("a", SHORT, when_full="wait")) == texts[0]
            with pytest.raises(InvalidRequest, match="when_full"):
                pipe.infer("a", when_full="later")

    def test_keeps_the_items_of_a_queue_in_its_inbox(self):
        inbox, outbox = queue.Queue(), queue.Queue()
        with slowly(queue_size=1) as pipe, pipe.stream_infer("x", ENDLESS) as stream, QueueAdapter(pipe) as bridge:
            bridge.add(inbox, outbox)
            for prompt in "abcd":
                inbox.put((prompt, SHORT))
            next(stream)
            assert inbox.qsize() >= 3
            stream.close()
            assert [outbox.get(timeout=10).text for _ in "abcd"] == [expected(p) for p in "abcd"]


class TestDeadlines:
    @every_caller
    def test_end_one_item_and_spare_the_others(self, call):
        with slowly(max_batch_size=4) as pipe:
            hurried = GenerationConfig(max_new_tokens=4000, ignore_eos=True, timeout_s=0.05)
            late, good = call(pipe, ["a", "b"], [hurried, SHORT])
            assert (late.finish_reason, late.error_code) == ("error", "timeout")
            assert "timeout_s=0.05" in late.error_message
            assert good.text == expected("b")


class TestBlockingCalls:
    def test_on_the_engines_own_loop_are_refused_at_once(self):
        with slowly() as pipe:
            stream = pipe.stream_infer("x", ENDLESS)

            async def misuse():
                for call in (
                    lambda: pipe.infer("x"),
                    lambda: pipe("x"),
                    lambda: pipe.stream_infer("x"),
                    lambda: next(stream),
                    lambda: pipe.chat("x"),
                    pipe.close,
                    lambda: pipe.thread.run(pipe.async_batch_infer("x")),
                    QueueAdapter(pipe).close,
                ):
                    with pytest.raises(BlockingCallError, match="engine's own event loop"):
                        call()
                with pytest.raises(BlockingCallError):
                    await pipe.aclose()

            pipe.thread.run(misuse())
            stream.close()

    @on_every_loop
    def test_inside_another_loop_work(self, run):
        with scripted() as pipe:

            async def main():
                return pipe(["Who are you?", "Paris is"], SHORT), list(pipe.stream_infer("x", SHORT))

            answers, pieces = run(main())
            assert [a.text for a in answers] == [expected("Who are you?"), expected("Paris is")]
            assert joined(pieces)[0].text == expected("x")

    def test_in_a_futures_callback_are_refused_and_harm_nobody(self, caplog):
        with scripted() as pipe:
            seen = []

            def callback(future):
                try:
                    pipe.infer("x")
                except BlockingCallError as error:
                    seen.append(error)

            pipe.submit("x", SHORT).add_done_callback(callback)
            assert pipe.infer("y", SHORT).text == expected("y")
            assert len(seen) == 1


class TestStreams:
    def test_are_checked_and_submitted_at_the_call(self):
        with scripted() as pipe:
            with pytest.raises(EmptyPrompt):
                pipe.stream_infer("")
            stream = pipe.stream_infer("x", SHORT)
            assert pipe.infer("y", SHORT).text == expected("y")
            assert [p.text for p in stream] == [expected("x")], "a slow consumer finds one larger piece"
            assert list(stream) == []

    @on_every_loop
    def test_deliver_what_came_before_a_fault(self, run):
        with scripted(fake={"fail_at": {4: RuntimeError("boom")}}, on_worker_failure="fail") as pipe:

            async def main():
                got = []
                stream = pipe.async_stream_infer("abcdef", SHORT)
                with pytest.raises(StepFailed):
                    async for piece in stream:
                        got.append(piece.text)  # noqa: PERF401
                assert [p async for p in stream] == []
                return "".join(got)

            assert run(main()) == "abcd"

    def test_of_a_list_give_one_error_item_for_a_bad_prompt(self):
        with scripted() as pipe:
            pieces = list(pipe.stream_infer(["a", "", "b"], SHORT))
            assert [p.error_code for p in pieces if p.index == 1] == ["empty_prompt"]
            assert joined(pieces)[2].text == expected("b")

    @on_every_loop
    def test_have_one_reader(self, run):
        with slowly(max_batch_size=1) as pipe, pipe.stream_infer("first", ENDLESS) as first:
            next(first)

            async def main():
                stream = pipe.async_stream_infer("waits", SHORT)
                coro = stream.__anext__()
                other = pipe.async_stream_infer("also", SHORT)
                if trio.lowlevel.in_trio_run():
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(stream.__anext__)
                        await trio.testing.wait_all_tasks_blocked()
                        with pytest.raises(InvalidRequest, match="one reader"):
                            await coro
                        nursery.cancel_scope.cancel()
                else:
                    reader = asyncio.ensure_future(stream.__anext__())
                    await asyncio.sleep(0)
                    with pytest.raises(InvalidRequest, match="one reader"):
                        await coro
                    reader.cancel()
                await other.aclose()
                await stream.aclose()

            run(main())

    @on_every_loop
    def test_are_read_where_they_were_made(self, run):
        with slowly() as pipe:
            streams = []

            async def make():
                streams.append(pipe.async_stream_infer("x", ENDLESS))

            async def read():
                with pytest.raises(InvalidRequest, match="another event loop"):
                    while True:
                        await anext(streams[0])

            run(make())
            asyncio.run(read())
            trio.run(read)
            streams.clear()

    def test_that_are_never_read_still_end(self):
        with scripted() as pipe:
            kept = [pipe.stream_infer("x", SHORT) for _ in range(10)]
            assert pipe.infer("y", SHORT).text == expected("y")
            assert [joined(stream)[0].text for stream in kept] == [expected("x")] * 10


class TestLongPrompts:
    @pytest.mark.parametrize("run", [LOOPS["asyncio"], LOOPS["uvloop"]])
    def test_are_prepared_elsewhere_while_the_callers_loop_goes_on(self, run, monkeypatch):
        with scripted(fake={"max_positions": 20_000}) as pipe:
            here, threads = threading.get_ident(), []
            prepare = type(pipe.engine.admission).prepare

            def watched(self, *args, **options):
                threads.append(threading.get_ident())
                return prepare(self, *args, **options)

            monkeypatch.setattr(type(pipe.engine.admission), "prepare", watched)

            async def main():
                long = await pipe.async_batch_infer("y" * 9_000, SHORT)
                assert here not in threads
                many = await pipe.async_batch_infer([f"{i} " for i in range(100)], SHORT)
                assert here not in threads
                short = await pipe.async_batch_infer("z", SHORT)
                assert threads[-1] == here
                return [long.text, many[99].text, short.text]

            assert run(main()) == [expected("y"), expected("99 "), expected("z")]

    @on_every_loop
    def test_raise_with_the_first_piece(self, run):
        with scripted() as pipe:

            async def main():
                stream = pipe.async_stream_infer("x" * 20_000, SHORT)
                with pytest.raises(InvalidRequest, match="20000"):
                    await anext(stream)
                assert [p async for p in stream] == []

            run(main())


class TestSettings:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: make_pipe(thread_safe=True),
            lambda: make_pipe(backend_config=EngineConfig(thread_safe=True)),
        ],
    )
    def test_thread_safe_is_refused_with_what_to_use_instead(self, make):
        with pytest.raises(ConfigError, match=r"QueueAdapter") as caught:
            make()
        assert "thread_safe=True" in str(caught.value)

    def test_thread_safe_set_later_is_refused_too(self):
        config = EngineConfig()
        config.thread_safe = True
        with pytest.raises(ConfigError, match="thread_safe=True"):
            make_pipe(backend_config=config)

    def test_an_explicit_false_passes(self):
        with make_pipe(thread_safe=False) as pipe:
            assert pipe.config.thread_safe is False

    def test_all_faults_are_named_at_once(self):
        with pytest.raises(ConfigError) as caught:
            make_pipe(tp=0, thread_safe=True, chat_template_config=object(), speculative_config=1)
        assert len(caught.value.problems) == 4

    def test_unknown_names_are_refused_with_the_nearest(self):
        with pytest.raises(ConfigError, match="did you mean 'max_batch_size'"):
            make_pipe(max_batchsize=4)

    def test_keywords_replace_settings_of_the_config(self):
        config = EngineConfig(max_batch_size=8, block_size=32)
        with make_pipe(backend_config=config, max_batch_size=4) as pipe:
            assert (pipe.config.max_batch_size, pipe.config.block_size) == (4, 32)
        assert config.max_batch_size == 8

    def test_names_of_lmdeploy_with_their_defaults_pass(self):
        make_pipe(chat_template_config=None, trust_remote_code=False, max_log_len=None).close()

    def test_the_log_level_is_that_of_the_logger_corogen(self, monkeypatch):
        import logging

        logger = logging.getLogger("corogen")
        before = logger.level
        try:
            make_pipe(log_level="ERROR").close()
            assert logger.level == logging.ERROR
            with pytest.raises(ConfigError, match="log_level"):
                make_pipe(log_level="LOUD")
        finally:
            logger.setLevel(before)

    def test_a_model_must_be_named(self):
        from corogen import pipeline

        with pytest.raises(ConfigError, match="no model was named"):
            pipeline()
        with pytest.raises(CorogenError, match="nowhere"):
            pipeline(model_path="./nowhere/at/all")


class TestAbort:
    def test_by_id_and_all(self):
        with slowly() as pipe:
            one = pipe.stream_infer("one", ENDLESS, request_id="one")
            two = pipe.submit("two", ENDLESS)
            three = pipe.submit(["three", "four"], ENDLESS)
            next(one)
            pipe.abort("one")
            assert [p.finish_reason for p in one][-1] == "abort"
            assert not two.done()
            pipe.abort()
            assert two.result(5).finish_reason == "abort"
            assert [a.finish_reason for a in three.result(5)] == ["abort"] * 2
            pipe.abort("one")
            pipe.abort("nobody")
            with pytest.raises(InvalidRequest):
                pipe.abort(7)


def test_a_progress_bar_on_request(capsys):
    with scripted() as pipe:
        pipe.infer(["a", "b"], SHORT, use_tqdm=True)
    assert "requests" in capsys.readouterr().err


def test_a_second_load_names_the_first(caplog, monkeypatch):
    async def no_files(*args):
        return None

    monkeypatch.setattr("corogen.startup.find_model", no_files)
    first = make_pipe(model="some/model")
    with make_pipe(model="other/model"):
        assert "again" not in caplog.text
    with make_pipe(model="some/model"):
        assert repr(first) in caplog.text
        assert "share one pipeline" in caplog.text
    first.close()
    caplog.clear()
    make_pipe(model="some/model").close()
    assert "again" not in caplog.text


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")
def test_a_signal_handler_may_ask_while_the_main_thread_waits():
    with slowly(max_batch_size=4) as pipe:
        answers = []
        before = signal.signal(signal.SIGUSR1, lambda number, frame: answers.append(pipe.infer("abc", SHORT).text))
        try:
            sender = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1))
            sender.start()
            texts = [a.text for a in pipe.infer(["xyz"] * 20, SHORT)]
            sender.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert texts == [expected("xyz")] * 20
        assert answers == [expected("abc")]
