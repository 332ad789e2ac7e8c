"""Workers that die, by script: tasks are computed again, and one that kills its worker fails alone."""

import signal

import pytest

from corogen.errors import EngineClosed, ModelNotFound, WorkerDied, WorkerStartError
from tests.conftest import eventually
from tests.tasks.helpers import Dies, FakeTaskExecutor, Lists, close_gate, open_gate, scripted


class Model:
    """Doubles its inputs; dies of what it is told to die of."""

    def __init__(self, dies):
        self.dies = dies

    def __call__(self, xs):
        if self.dies(xs):
            raise Dies
        return [2 * x for x in xs]


def once(condition):
    """Only the first time."""
    seen = []

    def check(xs):
        if condition(xs) and not seen:
            seen.append(xs)
            return True
        return False

    return check


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("corogen.restarts._BACKOFF_S", 0.001)


def results(engine, count=12):
    close_gate(engine)
    handles = [engine.submit(i, i) for i in range(count)]
    open_gate(engine)
    return [handle.exception(30) or handle.result() for handle in handles]


def test_tasks_whose_worker_died_are_computed_again():
    with scripted(Model(once(lambda xs: 5 in xs)), Lists(4)) as engine:
        assert results(engine) == [2 * i for i in range(12)]
        assert engine.stats().restarts == 1
        assert engine.executor.starts == 2


@pytest.mark.parametrize("exit_code", [1, -signal.SIGKILL])
def test_one_that_kills_its_worker_every_time_fails_alone(exit_code):
    executor = FakeTaskExecutor(Model(lambda xs: 5 in xs), exit_code=exit_code)
    with scripted(executor=executor, manager=Lists(4)) as engine:
        found = results(engine)
        assert isinstance(found[5], WorkerDied)
        assert "its last words" in str(found[5])
        assert [found[i] for i in range(12) if i != 5] == [2 * i for i in range(12) if i != 5]
        assert engine.submit("next", 1).result() == 2


def test_two_such_tasks_fail_both_and_no_others():
    with scripted(Model(lambda xs: 5 in xs or 6 in xs), Lists(4)) as engine:
        found = results(engine)
        assert [i for i in range(12) if isinstance(found[i], WorkerDied)] == [5, 6]


def test_a_suspect_that_is_cancelled_frees_the_way():
    with scripted(Model(lambda xs: "poison" in xs), Lists(1)) as engine:
        close_gate(engine)
        poison = engine.submit("p", "poison")
        other = engine.submit("o", 1)
        open_gate(engine)
        assert eventually(lambda: engine.stats().restarts >= 1)
        poison.cancel()
        assert other.result(30) == 2


def test_workers_that_can_not_be_brought_back_fail_everybody():
    executor = FakeTaskExecutor(Model(lambda xs: True), start_errors=[WorkerStartError("again")] * 20)
    with scripted(executor=executor, manager=Lists(4)) as engine:
        assert all(isinstance(e, WorkerStartError) for e in results(engine))
        with pytest.raises(EngineClosed, match="the engine has stopped"):
            engine.submit("late", 1)


def test_a_model_that_is_gone_is_not_waited_for():
    executor = FakeTaskExecutor(Model(lambda xs: True), start_errors=[ModelNotFound("it was deleted")])
    with scripted(executor=executor, manager=Lists(4)) as engine:
        assert all(isinstance(e, ModelNotFound) for e in results(engine))
        assert executor.starts == 2


def test_a_close_while_workers_are_brought_back_answers_everybody(monkeypatch):
    monkeypatch.setattr("corogen.restarts._BACKOFF_S", 60.0)
    with scripted(Model(lambda xs: True), Lists(4)) as engine:
        handles = [engine.submit(i, i) for i in range(4)]
        assert eventually(lambda: engine.stats().restarts == 1)
        engine.shutdown()
        assert all(isinstance(h.exception(30), EngineClosed) for h in handles)


def test_a_drain_outlives_a_death():
    with scripted(Model(once(lambda xs: True)), Lists(4)) as engine:
        close_gate(engine)
        handles = [engine.submit(i, i) for i in range(6)]
        open_gate(engine)
        engine.shutdown(drain=True, timeout_s=30)
        assert [h.result() for h in handles] == [0, 2, 4, 6, 8, 10]


def test_workers_that_die_at_rest_are_started_again():
    with scripted(Model(lambda xs: False), Lists(4)) as engine:
        assert engine.submit(0, 1).result() == 2
        for count in range(1, 8):
            engine.thread.loop.call_soon_threadsafe(engine.executor.on_failure, WorkerDied(0, 1))
            assert eventually(lambda count=count: engine.stats().restarts == count), engine.stats()
        assert engine.submit(1, 1).result(30) == 2


def test_a_broken_device_is_a_dead_worker():
    calls = []

    def model(xs):
        calls.append(xs)
        if len(calls) == 1:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return [2 * x for x in xs]

    with scripted(model, Lists(4)) as engine:
        assert results(engine, 4) == [0, 2, 4, 6]
        assert engine.stats().restarts == 1
