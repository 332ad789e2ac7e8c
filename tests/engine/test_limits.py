"""What is outstanding is bounded, nobody waits for ever, and deadlines end requests that would."""

import asyncio
import logging
import threading

import pytest

from corogen.config import EngineConfig
from corogen.errors import EngineClosed, InvalidRequest, QueueFullError, RequestTimeout
from corogen.params import GenerationConfig
from corogen.testing import FakeExecutor
from tests.engine.helpers import ENDLESS, assert_idle, make_engine, settle

SHORT = GenerationConfig(max_new_tokens=4)
LONG = GenerationConfig(max_new_tokens=ENDLESS, ignore_eos=True)


class TestWaitingTokens:
    async def test_a_prompt_beyond_the_bound_is_refused_with_the_sizes(self):
        async with make_engine(max_waiting_tokens=10, fake={"step_time_s": 30.0}) as engine:
            first = asyncio.create_task(engine.generate("x" * 6))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match=r"6 prompt tokens wait \(max_waiting_tokens 10") as caught:
                engine.stream("y" * 5)
            assert (caught.value.waiting_tokens, caught.value.token_limit) == (6, 10)
            first.cancel()

    async def test_prompts_that_run_do_not_count(self):
        async with make_engine(max_waiting_tokens=10, max_batch_size=2) as engine:
            streams = [engine.stream("x" * 9, LONG)]
            await anext(streams[0])
            streams.append(engine.stream("y" * 9, LONG))
            await anext(streams[1])
            with pytest.raises(QueueFullError):
                streams += [engine.stream("z" * 9), engine.stream("z" * 9)]

    async def test_a_prompt_that_alone_is_longer_is_served(self):
        async with make_engine(max_waiting_tokens=3) as engine:
            assert (await engine.generate("x" * 50, SHORT)).text == "xxxx"
            await settle(engine)
            assert_idle(engine)


class TestWaitingForRoom:
    @pytest.mark.parametrize("bound", [{"queue_size": 2}, {"max_waiting_tokens": 4}])
    async def test_everybody_is_answered_in_order(self, bound):
        done = []

        async def ask(i):
            answer = await engine.generate(chr(97 + i) * 4, SHORT, when_full="wait")
            done.append(i)
            return answer.text

        async with make_engine(max_batch_size=1, **bound) as engine:
            texts = await asyncio.gather(*(ask(i) for i in range(12)))
            assert texts == [chr(97 + i) * 4 for i in range(12)]
            assert done == list(range(12))
            await settle(engine)
            assert_idle(engine)

    async def test_those_outside_come_before_newcomers(self):
        async with make_engine(queue_size=1, fake={"step_time_s": 30.0}) as engine:
            running, outside = engine.stream("a", LONG), engine.stream("b", LONG, when_full="wait")
            assert engine.stats().waiting == 2
            await asyncio.sleep(0)
            await running.aclose()
            with pytest.raises(QueueFullError):
                engine.stream("c")
            await outside.aclose()

    async def test_those_outside_can_be_aborted_closed_and_time_out(self):
        engine = make_engine(queue_size=1, fake={"step_time_s": 30.0})
        await engine.start()
        running = engine.stream("a", LONG)
        outside = [engine.stream("b", LONG, when_full="wait", request_id=f"out{i}") for i in range(3)]
        hurried = asyncio.create_task(
            engine.generate("b", GenerationConfig(queue_timeout_s=0.01), when_full="wait", request_id="late")
        )
        engine.abort("out1")
        assert (await anext(outside[1])).finish_reason == "abort"
        with pytest.raises(RequestTimeout, match=r"request late: queue_timeout_s=0\.01 passed before its turn"):
            await hurried
        assert set(engine.request_ids()) == {running.request_id, "out0", "out2"}
        await engine.aclose()
        for stream in (running, outside[0], outside[2]):
            with pytest.raises(EngineClosed):
                await anext(stream)
        assert_idle_after_close(engine)

    async def test_another_word_for_it_is_refused(self):
        async with make_engine() as engine:
            with pytest.raises(InvalidRequest, match='when_full must be "raise" or "wait", not \'block\''):
                engine.stream("x", when_full="block")

    async def test_a_thread_that_waits_for_room_is_woken_by_room_and_by_the_end(self):
        engine = make_engine(queue_size=1, fake={"step_time_s": 30.0})
        await engine.start()
        stream = engine.stream("x", LONG)
        for leave in (stream.aclose, engine.aclose):
            waiter = threading.Thread(target=engine.wait_for_room)
            waiter.start()
            await leave()
            await asyncio.to_thread(waiter.join, 10)
            assert not waiter.is_alive()
            if leave == stream.aclose:
                stream = engine.stream("y", LONG)


def assert_idle_after_close(engine):
    assert engine.request_ids() == []
    assert engine.steps.num_active == 0
    assert engine.steps.num_waiting == 0


class TestDeadlines:
    async def test_an_answer_that_takes_too_long_ends_and_frees_everything(self):
        async with make_engine(fake={"step_time_s": 0.002}) as engine:
            stream = engine.stream("x", GenerationConfig(max_new_tokens=ENDLESS, ignore_eos=True, timeout_s=0.05))
            text = ""
            with pytest.raises(RequestTimeout, match=r"timeout_s=0\.05 passed before its answer") as caught:
                async for piece in stream:
                    text += piece.text
            assert caught.value.code == "timeout"
            assert isinstance(caught.value, TimeoutError)
            assert text, "what came before the deadline was delivered"
            await settle(engine)
            assert_idle(engine)
            assert engine.stats().ended == {"timeout": 1}

    async def test_waiting_counts_against_both(self):
        async with make_engine(max_batch_size=1, fake={"step_time_s": 30.0}) as engine:
            running = engine.stream("x", LONG)
            for name in ("timeout_s", "queue_timeout_s"):
                with pytest.raises(RequestTimeout, match=name):
                    await engine.generate("y", GenerationConfig(**{name: 0.01}))
            await running.aclose()

    async def test_an_answer_in_time_is_not_touched(self):
        async with make_engine() as engine:
            config = GenerationConfig(max_new_tokens=4, timeout_s=60, queue_timeout_s=60)
            assert (await engine.generate("x", config)).text == "xxxx"
            assert not engine.steps._deadlines._total
            assert not engine.steps._deadlines._queueing

    async def test_a_request_that_runs_has_left_the_queue(self):
        async with make_engine(fake={"step_time_s": 0.02}) as engine:
            config = GenerationConfig(max_new_tokens=6, queue_timeout_s=0.01)
            assert (await engine.generate("x", config)).text == "x" * 6

    async def test_a_deadline_passes_while_the_workers_are_down(self):
        executor = FakeExecutor(lambda prompt: prompt, step_time_s=30.0)
        async with make_engine(executor=executor) as engine:
            engine.steps.suspended = True
            with pytest.raises(RequestTimeout):
                await engine.generate("x", GenerationConfig(timeout_s=0.01))

    @pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1", True])
    @pytest.mark.parametrize("name", ["timeout_s", "queue_timeout_s"])
    async def test_a_wrong_value_is_refused_by_name(self, name, value):
        async with make_engine() as engine:
            with pytest.raises(InvalidRequest, match=name):
                engine.stream("x", GenerationConfig(**{name: value}))


class TestPriorities:
    async def order(self, *priorities, wait_s=0.0):
        """The order in which requests end that arrive one after the other, `wait_s` apart."""
        done, now = [], 0.0

        async def ask(i, request):
            out = engine.stream([1], SHORT, request_id=str(i))
            await anext(out)
            done.append(i)

        async with make_engine(max_batch_size=1, fake={"step_time_s": 0.001}) as engine:
            prepare = engine.admission.prepare

            def at(*args, **options):
                nonlocal now
                now += wait_s
                request = prepare(*args, **options)
                object.__setattr__(request, "arrival", now)
                object.__setattr__(request, "priority", priorities[int(request.id)])
                return request

            engine.admission.prepare = at
            await asyncio.gather(*(ask(i, None) for i in range(len(priorities))))
        return done[1:]

    async def test_urgent_ones_go_first(self):
        assert await self.order(0, 2, 1, 0) == [3, 2, 1]

    async def test_but_whoever_waits_long_enough_has_its_turn(self):
        assert await self.order(0, 1, 0, 0, 0, wait_s=4.0) == [2, 3, 1, 4]


class TestFigures:
    async def test_times_are_counted(self):
        async with make_engine(max_batch_size=1) as engine:
            await asyncio.gather(*(engine.generate("xy", SHORT) for _ in range(3)))
            stats = engine.stats()
            for times in (stats.queue_time, stats.first_token_time, stats.request_time):
                assert times.count == 3
                assert 0 <= times.mean_s <= times.max_s
                assert max(times.buckets.values()) == 3
            assert stats.step_time.count == stats.steps
            assert (stats.prompt_tokens, stats.new_tokens) == (6, 12)

    async def test_every_end_is_logged_without_text(self, caplog):
        caplog.set_level(logging.DEBUG, "corogen")
        async with make_engine() as engine:
            await engine.generate("secret", SHORT, request_id="r-1")
        (record,) = [r for r in caplog.records if r.name == "corogen.requests"]
        assert (record.request_id, record.reason, record.prompt_tokens, record.new_tokens) == ("r-1", "length", 6, 4)
        assert 0 <= record.queue_s <= record.first_token_s <= record.total_s
        assert "request_id=r-1" in record.getMessage()
        steps = [r for r in caplog.records if r.name == "corogen.steps"]
        assert (steps[0].prefill_rows, steps[0].decode_rows, steps[0].running) == (1, 0, 1)
        assert "secret" not in caplog.text

    async def test_prompts_are_logged_when_that_is_asked_for(self, caplog):
        caplog.set_level(logging.INFO, "corogen")
        async with make_engine(log_prompts=True) as engine:
            await engine.generate("secret", SHORT)
        assert "prompt='secret'" in caplog.text


@pytest.mark.parametrize("name", ["max_waiting_tokens", "log_prompts"])
def test_wrong_settings_are_refused_by_name(name):
    from corogen.config import check_config
    from corogen.errors import ConfigError

    with pytest.raises(ConfigError, match=name):
        check_config(EngineConfig(**{name: -1}))
