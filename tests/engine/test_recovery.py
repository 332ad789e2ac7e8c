"""Faults of steps and workers: requests go on with the very tokens that would have come."""

import asyncio

import pytest

from corogen import recovery
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


class DiesAtRest(FakeExecutor):
    async def start(self, spec, on_phase):
        ready = await super().start(spec, on_phase)
        self.starts = getattr(self, "starts", 0) + 1
        if 1 < self.starts < 12:
            asyncio.get_running_loop().call_soon(lambda: self.on_failure(WorkerDied(0, -9)))
        return ready


async def test_workers_that_die_at_rest_are_started_again_however_often(monkeypatch):
    monkeypatch.setattr(recovery, "_BACKOFF_S", 0.0001)
    executor = DiesAtRest(repeats_the_prompt)
    async with make_engine(executor=executor) as engine:
        executor.on_failure(WorkerDied(0, -9))
        while executor.starts < 12:
            await asyncio.sleep(0.001)
        assert (await engine.generate("abc", NEW)).text == "abc" * 10
        assert engine.health.state is State.READY


async def test_only_the_step_that_was_computed_is_blamed():
    """Others that run, and have no row in the fatal step, never run alone."""

    class DiesOfPrefill(FakeExecutor):
        def submit(self, step):
            if any(row.token_ids[:1] == [33] for row in step.prefill):  # "!"
                self.fail_at[step.step] = WorkerDied(0, -11)
            super().submit(step)

    async with make_engine(
        executor=DiesOfPrefill(repeats_the_prompt), max_prefill_token_num=4, max_batch_size=4
    ) as engine:
        good = [asyncio.create_task(engine.generate(p, NEW)) for p in ("abc", "xyz")]
        with pytest.raises(WorkerDied):
            await engine.generate("!bad", NEW)
        assert [(await task).text for task in good] == ["abc" * 10, "xyz" * 10]


async def test_what_had_arrived_before_a_death_counts(monkeypatch):
    executor = FakeExecutor(repeats_the_prompt, step_time_s=30.0)
    async with make_engine(executor=executor) as engine:
        stream = engine.stream("abc", NEW)
        while not executor._queue:
            await asyncio.sleep(0)
        step, _ = executor._queue.popleft()
        executor.on_result(executor._answer(step, None))
        executor.on_failure(WorkerDied(0, -9))
        assert (await anext(stream)).text == "a"
        await stream.aclose()
