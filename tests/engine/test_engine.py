"""The engine on its own loop, over scripted answers."""

import asyncio
import gc

import pytest

from corogen.config import EngineConfig
from corogen.engine import Engine
from corogen.errors import (
    ConfigError,
    EngineClosed,
    InvalidRequest,
    PromptTooLong,
    QueueFullError,
    RequestFailed,
    StepFailed,
)
from corogen.params import GenerationConfig
from tests.engine.helpers import assert_idle, make_engine, says, settle


async def test_an_answer_has_its_text_ids_lengths_and_reason():
    async with make_engine(says("Hello there", then_eos=True)) as engine:
        answer = await engine.generate("who is it")
        assert answer.text == "Hello there"
        assert answer.finish_reason == "stop"
        assert answer.generate_token_len == len(answer.token_ids)
        assert answer.token_ids[-1] == engine._tokenizer.backend.token_to_id("<|eos|>")
        assert answer.stop_reason is None, "the model's own end is no news"
        assert answer.input_token_len == len("who is it")
        await settle(engine)
        assert_idle(engine)


async def test_a_stream_joins_to_the_whole_answer_and_counts_its_tokens():
    config = GenerationConfig(max_new_tokens=30)
    async with make_engine(says("你好，世界 👨‍👩‍👧 é and so on")) as engine:
        whole = await engine.generate("x", config)
        pieces = [piece async for piece in engine.stream("x", config)]
        assert "".join(p.text for p in pieces) == whole.text
        assert [i for p in pieces for i in p.token_ids] == whole.token_ids
        assert pieces[-1].finish_reason == whole.finish_reason == "length"
        assert pieces[-1].generate_token_len == 30
        assert all("\ufffd" not in p.text for p in pieces[:-1])
        assert all(p.text for p in pieces[:-1]), "a held-back character is no piece"


async def test_many_requests_at_once_stay_apart():
    async with make_engine(max_batch_size=16, fake={"num_blocks": 4096}) as engine:
        prompts = [f"prompt number {i}" for i in range(200)]
        configs = [GenerationConfig(max_new_tokens=20 + i % 21) for i in range(200)]
        answers = await asyncio.gather(*map(engine.generate, prompts, configs))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert (prompt * 4).startswith(answer.text)
            assert answer.generate_token_len == 20 + i % 21
        log = engine.step_log(4096)
        assert max(record.running for record in log) == 16
        assert any(record.prefill_rows and record.decode_rows for record in log)
        await settle(engine)
        assert_idle(engine)


async def test_scarce_blocks_preempt_without_a_trace_in_the_text():
    config = GenerationConfig(max_new_tokens=60)
    async with make_engine(num_gpu_blocks=10, max_batch_size=8) as engine:
        prompts = [f"twenty characters {i:02}" for i in range(8)]
        answers = await asyncio.gather(*(engine.generate(p, config) for p in prompts))
        assert [a.text for a in answers] == [(p * 4)[:60] for p in prompts]
        assert engine.stats().preemptions >= 1
        await settle(engine)
        assert_idle(engine)


async def test_an_answer_is_capped_by_the_cache_and_a_prompt_that_can_not_fit_is_refused():
    async with make_engine(num_gpu_blocks=8) as engine:
        with pytest.raises(PromptTooLong, match="200 tokens and the context holds 128"):
            await engine.generate("x" * 200)
        assert (await engine.generate("hi", GenerationConfig(max_new_tokens=4))).generate_token_len == 4
        answer = await engine.generate("y" * 100, GenerationConfig(max_new_tokens=100))
        assert (answer.generate_token_len, answer.finish_reason) == (28, "length")


async def test_leaving_a_stream_frees_everything_within_a_step():
    async with make_engine() as engine:
        async with engine.stream("endless", GenerationConfig(max_new_tokens=None)) as stream:
            async for _ in stream:
                break
        await settle(engine)
        assert_idle(engine)
        assert engine.stats().ended["abort"] == 1


async def test_dropping_the_last_reference_aborts():
    async with make_engine() as engine:
        stream = engine.stream("endless", GenerationConfig(max_new_tokens=None))
        await anext(stream)
        del stream
        gc.collect()
        await settle(engine)
        assert_idle(engine)


async def test_cancelling_a_task_aborts_its_request_wherever_it_waits():
    async with make_engine(fake={"step_time_s": 0.001}) as engine:
        config = GenerationConfig(max_new_tokens=None)
        tasks = [asyncio.create_task(engine.generate("endless", config)) for _ in range(8)]
        for turns, task in enumerate(tasks):
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        other = await engine.generate("alive", GenerationConfig(max_new_tokens=5))
        assert other.text == "alive"
        while engine.stats().running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert_idle(engine)


async def test_abort_by_id_ends_the_reader_and_may_come_twice_late_or_for_nobody():
    async with make_engine() as engine:
        stream = engine.stream("endless", GenerationConfig(max_new_tokens=None), request_id="mine")
        await anext(stream)
        engine.abort("mine")
        engine.abort("mine")
        last = [piece async for piece in stream][-1]
        assert last.finish_reason == "abort"
        engine.abort("mine")
        engine.abort("nobody")
        await settle(engine)
        assert_idle(engine)


async def test_aclose_while_another_task_waits_ends_that_task():
    async with make_engine(fake={"step_time_s": 30.0}) as engine:
        stream = engine.stream("slow")
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        await stream.aclose()
        assert (await reader).finish_reason == "abort"


async def test_a_full_queue_refuses_at_once_and_serves_the_others():
    async with make_engine(queue_size=4, max_batch_size=1) as engine:
        tasks = [asyncio.create_task(engine.generate("x", GenerationConfig(max_new_tokens=8))) for _ in range(20)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [r for r in results if isinstance(r, QueueFullError)]
        assert len(refused) == 16
        assert (refused[0].outstanding, refused[0].limit) == (4, 4)
        assert (await engine.generate("x", GenerationConfig(max_new_tokens=8))).text == "x" * 8


async def test_closing_answers_every_waiter():
    engine = make_engine(fake={"step_time_s": 30.0})
    await engine.start()
    tasks = [asyncio.create_task(engine.generate("x")) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.gather(engine.aclose(), engine.aclose())
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineClosed) for r in results)
    with pytest.raises(EngineClosed, match="closed"):
        await engine.generate("x")


async def test_draining_lets_the_running_ones_finish_and_takes_no_new_ones():
    engine = make_engine(fake={"step_time_s": 0.001})
    await engine.start()
    task = asyncio.create_task(engine.generate("drain", GenerationConfig(max_new_tokens=20)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.aclose(drain=True))
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed):
        engine.prepare("late")
    assert (await task).generate_token_len == 20
    await closing


async def test_a_failing_step_fails_its_requests_and_the_engine_goes_on():
    async with make_engine(fake={"fail_at": {3: RuntimeError("boom")}}, on_worker_failure="fail") as engine:
        config = GenerationConfig(max_new_tokens=20)
        results = await asyncio.gather(*(engine.generate(f"p{i}", config) for i in range(3)), return_exceptions=True)
        assert all(isinstance(r, StepFailed) and "boom" in str(r) for r in results)
        assert (await engine.generate("again", config)).text == ("again" * 4)[:20]
        await settle(engine)
        assert_idle(engine)


async def test_pieces_that_came_before_a_fault_are_delivered_before_it():
    async with make_engine(fake={"fail_at": {3: RuntimeError("boom")}}, on_worker_failure="fail") as engine:
        stream, got = engine.stream("abcdef", GenerationConfig(max_new_tokens=20)), ""
        with pytest.raises(StepFailed, match="boom"):
            while True:
                got += (await anext(stream)).text
        assert got == "abc"


async def test_a_fault_in_one_requests_text_harms_no_other(monkeypatch):
    async with make_engine() as engine:
        config = GenerationConfig(max_new_tokens=12)
        bad = engine.stream("bad", config, request_id="bad")
        good = engine.stream("good", config)
        engine._intake.drain()
        active = engine.steps._active["bad"]
        monkeypatch.setattr(type(active), "advance", _advance_that_fails(type(active).advance, active))
        with pytest.raises(RequestFailed, match="no such thing") as caught:
            [piece async for piece in bad]
        assert isinstance(caught.value.__cause__, LookupError)
        assert "".join([piece.text async for piece in good]) == "good" * 3
        await settle(engine)
        assert_idle(engine)


def _advance_that_fails(original, victim):
    def advance(self, token):
        if self is victim:
            raise LookupError("no such thing")
        return original(self, token)

    return advance


async def test_an_id_in_use_is_refused():
    async with make_engine() as engine:
        stream = engine.stream("x", request_id="same")
        with pytest.raises(InvalidRequest, match="'same' is in use"):
            engine.stream("x", request_id="same")
        await stream.aclose()


async def test_an_engine_that_is_not_started_says_so():
    with pytest.raises(EngineClosed, match="not started"):
        make_engine().prepare("x")


def test_a_bad_config_is_refused_before_anything_happens():
    with pytest.raises(ConfigError, match="thread_safe"):
        Engine("nowhere", EngineConfig(thread_safe=True))
    with pytest.raises(ConfigError, match="no model was named"):
        Engine()
    with pytest.raises(ConfigError, match="42"):
        Engine(42)


async def test_an_idle_engine_schedules_nothing():
    loop = asyncio.get_running_loop()
    async with make_engine() as engine:
        await engine.generate("x", GenerationConfig(max_new_tokens=3))
        await settle(engine)
        await asyncio.sleep(0.01)
        assert not loop._ready, "callbacks are queued although nobody asked for anything"
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]
