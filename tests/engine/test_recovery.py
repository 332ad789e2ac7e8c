"""Faults of steps and workers: requests go on with the very tokens that would have come."""

import asyncio

import pytest

from corogen.errors import EngineClosed, StepFailed, WorkerDied, WorkerStartError
from corogen.params import GenerationConfig
from corogen.recovery import MAX_RESTARTS, State
from corogen.testing import FakeExecutor
from tests.engine.helpers import assert_idle, make_engine, repeats_the_prompt, settle

NEW = GenerationConfig(max_new_tokens=30)
PROMPTS = [f"prompt {i}" for i in range(6)]
ANSWERS = [(p * 5)[:30] for p in PROMPTS]


def death():
    return WorkerDied(0, -9, "Killed")


async def ask_all(engine):
    return await asyncio.gather(*(engine.generate(p, NEW) for p in PROMPTS), return_exceptions=True)


@pytest.mark.parametrize("fault", [death(), RuntimeError("boom")], ids=["death", "exception"])
@pytest.mark.parametrize("step", [0, 1, 5, 20])
async def test_requests_resume_with_the_same_tokens(fault, step):
    async with make_engine(fake={"fail_at": {step: fault}}, max_batch_size=4) as engine:
        assert [a.text for a in await ask_all(engine)] == ANSWERS
        assert engine.stats().restarts == isinstance(fault, WorkerDied)
        assert engine.health.state is State.READY
        assert engine.health.last_error is not None
        await settle(engine)
        assert_idle(engine)


async def test_a_stream_sees_a_pause_and_no_error():
    async with make_engine(fake={"fail_at": {4: death(), 9: death(), 14: death()}}) as engine:
        text = "".join([piece.text async for piece in engine.stream("abc", NEW)])
        assert text == "abc" * 10
        assert engine.stats().restarts == 3


async def test_with_the_policy_fail_those_that_ran_get_the_error_and_those_that_waited_go_on():
    options = {"max_batch_size": 2, "on_worker_failure": "fail"}
    async with make_engine(fake={"fail_at": {5: death()}}, **options) as engine:
        results = await ask_all(engine)
        assert [isinstance(r, WorkerDied) for r in results] == [True, True, False, False, False, False]
        assert [r.text for r in results[2:]] == ANSWERS[2:]
        await settle(engine)
        assert_idle(engine)


class Poisoned(FakeExecutor):
    """The worker dies (or raises) whenever it computes a token of the prompt that begins with `!`."""

    def __init__(self, fault, after=0):
        super().__init__(repeats_the_prompt)
        self.fault, self.after, self.deaths = fault, after, 0

    def submit(self, step):
        super().submit(step)
        if self._is_poison(step):
            self.deaths += 1
            self.fail_at[step.step] = self.fault

    def _is_poison(self, step):
        known = [row.token_ids for row in step.prefill]
        known += [self._slots[slot].tokens for slot in step.decode if slot in self._slots]
        return any(ids[:1] == [ord("!")] and len(ids) > self.after + 2 for ids in known)


@pytest.mark.parametrize("fault", [death(), RuntimeError("boom")], ids=["death", "exception"])
@pytest.mark.parametrize("after", [0, 7])
async def test_one_poisonous_input_fails_alone(fault, after):
    executor = Poisoned(fault, after)
    async with make_engine(executor=executor, enable_prefix_caching=False) as engine:
        poison = asyncio.create_task(engine.generate("!xy", NEW))
        results = await ask_all(engine)
        assert [r.text for r in results] == ANSWERS
        with pytest.raises(type(fault) if isinstance(fault, WorkerDied) else StepFailed):
            await poison
        assert executor.deaths <= 10, "two steps are in flight at each of at most five faults"
        await settle(engine)
        assert_idle(engine)


async def test_out_of_memory_lowers_the_budget_and_fails_nobody():
    options = {"max_batch_size": 4, "max_prefill_token_num": 64}
    async with make_engine(fake={"fail_at": {1: MemoryError("too much")}}, **options) as engine:
        assert [a.text for a in await ask_all(engine)] == ANSWERS
        assert engine.steps.scheduler.token_budget == 32


class NeverStartsAgain(FakeExecutor):
    """Starts once."""

    starts = 0

    async def start(self, spec, on_phase):
        self.starts += 1
        if self.starts > 1:
            raise WorkerStartError("no more")
        return await super().start(spec, on_phase)


async def test_workers_that_do_not_come_back_end_everything_with_the_reason(monkeypatch):
    monkeypatch.setattr("corogen.recovery._BACKOFF_S", 0.001)
    executor = NeverStartsAgain(repeats_the_prompt, fail_at={3: death()})
    async with make_engine(executor=executor) as engine:
        assert all(isinstance(r, WorkerStartError) for r in await ask_all(engine))
        assert executor.starts == 1 + MAX_RESTARTS
        assert engine.health.state is State.FAILED
        with pytest.raises(EngineClosed, match="no more"):
            await engine.generate("x")


async def test_abort_and_close_work_while_the_workers_are_down(monkeypatch):
    monkeypatch.setattr("corogen.recovery._BACKOFF_S", 30.0)
    executor = NeverStartsAgain(repeats_the_prompt, fail_at={3: death()})
    async with make_engine(executor=executor) as engine:
        stream = engine.stream("abc", GenerationConfig(max_new_tokens=None), request_id="a")
        waiter = asyncio.create_task(engine.generate("abc", GenerationConfig(max_new_tokens=None)))
        while engine.health.state is not State.RESTARTING:
            await asyncio.sleep(0)
        engine.abort("a")
        assert [piece async for piece in stream][-1].finish_reason == "abort"
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await waiter
        assert engine.health.state is State.CLOSED
