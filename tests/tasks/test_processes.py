"""Real workers: what may be a model, what may travel, and what happens when one is killed."""

import collections
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from corogen import launch_engine
from corogen.errors import (
    ConfigError,
    ModelNotFound,
    QueueFullError,
    RequestFailed,
    StepFailed,
    WorkerDied,
    WorkerStartError,
)
from tests.conftest import eventually
from tests.tasks.helpers import Lists

pytestmark = pytest.mark.timeout(300)


class Scale(nn.Module):
    """Multiplies by `factor`; random in training mode, so that only eval() gives equal answers."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        assert torch.is_inference_mode_enabled()
        return self.dropout(x * self.factor)


def launch(model_fn=Scale, **options):
    return launch_engine(model_fn=model_fn, device_type="cpu", num_threads=1, **options)


def test_a_module_runs_in_eval_and_inference_mode_and_arguments_reach_it():
    with launch(factor=3.0) as engine:
        engine.submit(0, torch.ones(4))
        assert torch.equal(engine.get(0), torch.full((4,), 3.0))


def test_energonais_call_works_with_its_ports_and_one_warning(caplog):
    with launch_engine(1, 1, "localhost", 19990, 19980, Scale, 1, 0, None, 1, 0, True) as engine:
        engine.submit(0, torch.ones(2))
        assert engine.get(0, interval=0.05).tolist() == [2.0, 2.0]
    assert len([r for r in caplog.records if "rpc_port" in r.message]) == 1


def test_any_callable_is_a_model_and_any_name_an_argument():
    names = {"pipe_size": 1, "progress": 2, "rank": 3, "model_fn": 4}
    with launch(lambda **given: lambda x: (x, given), model_kwargs=names, rank=5) as engine:
        assert engine.submit(0, "x").result() == ("x", {**names, "rank": 5})


@dataclasses.dataclass
class Point:
    x: int


VALUES = {
    "scalars": (1, 2.5, "text", b"bytes", None),
    "tensors": [torch.arange(6).reshape(2, 3), torch.tensor(3), torch.zeros(0, 4), torch.ones(3).bool()],
    "halves": {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(3).half()},
    "views": [torch.arange(12.0).reshape(3, 4).t()[1:], torch.ones(2, dtype=torch.complex64).conj()],
    "arrays": [np.arange(6).reshape(2, 3), np.float32(1.5)],
    "own classes": [Point(3), collections.OrderedDict(a=Point(1))],
    "large": [torch.arange(3_000_000)],
}


@pytest.fixture(scope="module")
def echo():
    with launch(lambda: lambda x: x) as engine:
        yield engine


@pytest.mark.parametrize("name", VALUES)
def test_values_arrive_as_they_were_sent(echo, name):
    torch.testing.assert_close(plain(echo.submit(name, (VALUES[name],)).result()), plain(VALUES[name]), rtol=0, atol=0)


def plain(value):
    """Containers as lists and tensors, which assert_close can compare exactly."""
    if isinstance(value, dict):
        return [plain(v) for v in value.values()]
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Point):
        return value.x
    if isinstance(value, str | bytes):
        return list(value.encode() if isinstance(value, str) else value)
    return -1 if value is None else value


def test_results_are_the_readers_own(echo):
    first = echo.submit(0, torch.ones(3)).result()
    first += 1
    assert echo.submit(1, torch.ones(3)).result().tolist() == [1.0, 1.0, 1.0]
    assert not first.is_inference()


def test_functions_and_classes_of_a_script_travel(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio
            from dataclasses import dataclass
            from torch import nn
            from corogen import launch_engine

            @dataclass
            class Pair:
                a: int
                b: int

            class Sum(nn.Module):
                def forward(self, pair):
                    return Pair(pair.a + pair.b, OFFSET)

            OFFSET = 7

            def build():
                return Sum()

            async def main():
                async with launch_engine(tp=1, pp=1, model_fn=build) as engine:
                    engine.submit("uid", Pair(1, 2))
                    result = await engine.wait("uid")
                    assert isinstance(result, Pair), type(result)
                    print(result)

            asyncio.run(main())
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "Pair(a=3, b=7)\n", done.stderr


# ------------------------------------------------------------------ starts that fail


def broken(how):
    if how == "raise":
        raise RuntimeError("no such checkpoint, and no checkpoint at all")
    if how == "typed":
        raise ModelNotFound("there is no model here")
    if how == "exit":
        print("about to leave", flush=True)
        os._exit(3)
    if how == "hang":
        time.sleep(600)
    return "no callable"


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("raise", WorkerStartError, "in broken\n.*no such checkpoint"),
        ("typed", ModelNotFound, "there is no model here"),
        ("exit", WorkerStartError, "exit code 3 in phase 'build'.*about to leave"),
        ("hang", WorkerStartError, "still in phase 'build' after start_timeout_s"),
        ("value", ConfigError, "must return a torch module or another callable, not 'no callable'"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(how, error, words, no_threads_left):
    with pytest.raises(error, match=f"(?s){words}"):
        launch(broken, how=how, start_timeout_s=8 if how == "hang" else None)


def test_wrong_arguments_are_named_all_at_once():
    with pytest.raises(ConfigError) as caught:
        launch_engine(tp=0, pipe_size=0, queue_size=-1, model_fn="opt", n_nodes=2, batch_manager=3)
    assert len(caught.value.problems) == 6
    with pytest.raises(ConfigError, match="two names for one number"):
        launch_engine(tp=1, tp_world_size=2, model_fn=Scale)
    with pytest.raises(ConfigError, match="can not be sent to the workers"):
        launch(Scale, lock=threading.Lock())


# ------------------------------------------------------------------ faults


def test_an_error_of_the_model_reaches_its_task_with_traceback_and_cause():
    with launch() as engine:
        handle = engine.submit(0, "a text")
        error = handle.exception(60)
        assert isinstance(error, StepFailed)
        assert "in forward" in str(error)
        assert isinstance(error.__cause__, TypeError)
        assert engine.submit(1, torch.ones(1)).result().tolist() == [2.0]
        assert engine.stats().restarts == 0


def slow_double(seconds):
    def model(xs):
        time.sleep(seconds)
        return [2 * x for x in xs]

    return model


@pytest.mark.parametrize("queue_size", [0, 64])
def test_kill_9_under_load_and_every_task_is_answered(queue_size):
    answers, stop = {}, threading.Event()

    def ask(thread):
        number = 0
        while not stop.is_set():
            uid = (thread, number)
            try:
                engine.submit(uid, number)
            except QueueFullError:
                time.sleep(0.01)
                continue
            answers[uid] = engine.get(uid, 60)
            number += 1

    with launch(slow_double, seconds=0.002, batch_manager=Lists(8), queue_size=queue_size) as engine:
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for kill in range(1, 4):
            assert eventually(lambda: len(answers) > 100 * kill, 30)  # noqa: B023
            os.kill(engine.pids[0], signal.SIGKILL)
            assert eventually(lambda: engine.stats().restarts == kill, 30)  # noqa: B023
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert all(answer == 2 * number for (_, number), answer in answers.items())
    assert engine.stats().ended == {"done": len(answers)}


def deadly():
    def model(xs):
        if 5 in xs:
            os.kill(os.getpid(), signal.SIGSEGV)
        return xs

    return model


def test_an_input_that_kills_its_worker_fails_alone():
    with launch(deadly, batch_manager=Lists(4)) as engine:
        handles = [engine.submit(i, i) for i in range(12)]
        found = [handle.exception(120) or handle.result() for handle in handles]
        assert isinstance(found[5], WorkerDied)
        assert "signal 11" in str(found[5])
        assert [x for i, x in enumerate(found) if i != 5] == [i for i in range(12) if i != 5]


def test_a_batch_that_takes_too_long_ends_its_worker_and_the_others_go_on():
    with launch(lambda: lambda s: time.sleep(s) or s, step_timeout_s=1.0) as engine:
        late, quick = engine.submit("late", 600), engine.submit("quick", 0)
        assert quick.result(120) == 0
        assert isinstance(late.exception(120), StepFailed)


def test_a_forked_child_is_told_that_the_engine_is_not_its_own():
    from corogen.errors import EngineClosed

    with launch() as engine:
        child = os.fork()
        if child == 0:
            try:
                engine.submit(0, torch.ones(1))
            except EngineClosed as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert engine.submit(1, torch.ones(1)).result().tolist() == [2.0]


SCRIPT = """
import os, sys, time
from corogen import launch_engine

with launch_engine(model_fn=lambda: lambda x: time.sleep(x), num_threads=1) as engine:
    engine.register_sigint()
    engine.submit(0, 600)
    print(engine.pids[0], flush=True)
    try:
        engine.get(0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(number):
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(number)
        out, _ = parent.communicate(timeout=60)
    assert out == ("interrupted\n" if number == signal.SIGINT else "")
    assert eventually(lambda: not exists(worker), 30)


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_handler_of_ctrl_c_is_put_back_and_belongs_to_the_main_thread():
    from corogen.errors import InvalidRequest

    before = signal.getsignal(signal.SIGINT)
    with launch() as engine:
        engine.register_sigint()
        engine.register_sigint()
        assert signal.getsignal(signal.SIGINT) is not before
        failures = []

        def elsewhere():
            try:
                engine.register_sigint()
            except InvalidRequest as error:
                failures.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert failures
    assert signal.getsignal(signal.SIGINT) is before


def test_an_input_without_a_meaning_for_the_worker_fails_alone(echo):
    class Local:
        def __reduce__(self):
            return eval, ("1 / 0",)

    assert isinstance(echo.submit("bad", Local()).exception(60), StepFailed | RequestFailed)
    assert echo.submit("good", 1).result(60) == 1
