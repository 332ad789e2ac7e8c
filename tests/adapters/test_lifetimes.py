"""Pipelines at the edges of a process's life: closed descriptors, forks, interrupts, the interpreter's exit."""

import asyncio
import os
import pickle
import queue
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from corogen.adapters.queues import QueueAdapter
from corogen.engine import Engine
from corogen.errors import EngineClosed, InvalidRequest, PromptTooLong, QueueFullError, WorkerDied
from corogen.params import GenerationConfig
from corogen.testing import FakeExecutor
from corogen.testing.tiny import tiny_model
from tests.adapters.helpers import ENDLESS, SHORT, expected, make_pipe, scripted, slowly

ROOT = Path(__file__).resolve().parents[2]


def run(code, *arguments, timeout=60):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("descriptors", [(0,), (1,), (0, 2)])
def test_closed_standard_descriptors_do_no_harm(descriptors):
    done = run(
        f"""
        import os
        for descriptor in {descriptors}: os.close(descriptor)
        from corogen import Pipeline
        from corogen.testing import FakeExecutor
        with Pipeline(executor=FakeExecutor()) as pipe:
            assert pipe.infer([1, 2]).token_ids[0] == 5
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_where_the_engine_runs_and_leaves_it_alone():
    done = run(
        """
        import os
        from corogen import GenerationConfig, Pipeline
        from corogen.errors import EngineClosed
        from corogen.testing import FakeExecutor
        with Pipeline(executor=FakeExecutor()) as pipe:
            child = os.fork()
            if not child:
                try:
                    pipe.infer([1])
                except EngineClosed as error:
                    pipe.close()
                    os._exit(7 if "forked from it" in str(error) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert pipe.infer([1, 2], GenerationConfig(max_new_tokens=2)).token_ids == [5, 5]
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_worker_ends_with_its_engine_also_while_a_forked_child_lives(tmp_path):
    psutil = pytest.importorskip("psutil")
    done = run(
        """
        import os, sys, time
        from corogen import Pipeline
        pipe = Pipeline(sys.argv[1])
        (worker,) = pipe.engine._executor.pids
        child = os.fork()
        if not child:
            os.close(1), os.close(2)
            time.sleep(60)
            os._exit(0)
        print(worker, child, flush=True)
        os.kill(os.getpid(), 9)
        """,
        tiny_model(tmp_path, with_tokenizer=True),
    )
    worker, child = map(int, done.stdout.split())
    try:
        deadline = time.monotonic() + 20
        while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the worker lives on"
            time.sleep(0.05)
    finally:
        os.kill(child, 9)


def test_a_pipeline_can_be_closed_and_asked_at_exit(tmp_path):
    done = run(
        """
        import asyncio, atexit, sys
        from corogen import GenerationConfig, Pipeline
        pipe = Pipeline(sys.argv[1])
        short = GenerationConfig(max_new_tokens=2, ignore_eos=True)
        def bye():
            print(asyncio.run(pipe.async_batch_infer(["x"] * 80, short))[79].generate_token_len)
            pipe.close()
            print("closed")
        atexit.register(bye)
        """,
        tiny_model(tmp_path, with_tokenizer=True),
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["2", "closed"], "")


class TestDraining:
    async def test_that_is_given_up_does_not_hold_up_the_next_close(self):
        async with Engine(executor=FakeExecutor(step_time_s=30.0)) as engine:
            answer = asyncio.create_task(engine.generate([1, 2], GenerationConfig(max_new_tokens=2000)))
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.aclose(drain=True), 0.01)
        with pytest.raises(EngineClosed):
            await answer

    async def test_is_ended_by_a_close_without_it(self):
        engine = Engine(executor=FakeExecutor(step_time_s=30.0))
        await engine.start()
        answer = asyncio.create_task(engine.generate([1, 2]))
        await asyncio.sleep(0)
        draining = asyncio.create_task(engine.aclose(drain=True))
        await asyncio.sleep(0)
        assert not draining.done()
        await engine.aclose()
        await draining
        with pytest.raises(EngineClosed):
            await answer

    def test_takes_a_number_of_seconds(self):
        with scripted() as pipe:
            for timeout_s in ("5", -1, float("nan")):
                with pytest.raises(InvalidRequest, match="timeout_s"):
                    pipe.close(drain=True, timeout_s=timeout_s)
            assert pipe.infer("abc", SHORT).text == expected("abc"), "nothing has been closed"


def test_a_queue_adapter_closes_in_time_although_its_inbox_is_full_and_the_engine_too():
    pipe = make_pipe(queue_size=1, fake={"step_time_s": 0.01, "max_positions": 20_000})
    inbox, outbox = queue.Queue(1), queue.Queue()
    with pipe:
        bridge = QueueAdapter(pipe, ENDLESS)
        bridge.add(inbox, outbox)
        for prompt in "abc":  # runs, waits for room in the reader, lies in the inbox
            inbox.put(prompt)
        began = time.monotonic()
        bridge.close(timeout_s=0.1)
        assert time.monotonic() - began < 5
        first, *others = [outbox.get(timeout=10) for _ in "abc"]
        assert first.finish_reason == "abort"
        assert all(isinstance(item, EngineClosed) for item in others)


def test_what_a_full_inbox_holds_is_answered_after_a_removal():
    inbox, outbox = queue.Queue(2), queue.Queue()
    with slowly() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        bridge.add(inbox, outbox)
        for prompt in "abcd":
            inbox.put(prompt)
        bridge.remove(inbox)
        assert [outbox.get(timeout=10).text for _ in "abcd"] == [expected(p) for p in "abcd"]


@pytest.mark.parametrize("error", [PromptTooLong(9, 8), QueueFullError(3, 3, 7, 9), WorkerDied(1, -9, "last words")])
def test_errors_travel_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.__dict__) == (type(error), str(error), error.__dict__)


@pytest.mark.parametrize("config", [{"top_k": 10**30, "do_sample": True}, {"min_new_tokens": 2**64}])
def test_numbers_that_no_message_can_hold_are_refused(config):
    with scripted() as pipe, pytest.raises(InvalidRequest, match=next(iter(config))):
        pipe.infer("abc", GenerationConfig(**config))


def test_a_step_that_can_not_be_sent_fails_its_request_alone(monkeypatch):
    class Picky(FakeExecutor):
        def submit(self, step):
            if any(row.token_ids and row.token_ids[0] == 13 for row in step.prefill):
                raise OverflowError("can't serialize")
            super().submit(step)

    async def main():
        async with Engine(executor=Picky()) as engine:
            bad, good = await asyncio.gather(
                engine.generate([13, 1], SHORT), engine.generate([5, 1], SHORT), return_exceptions=True
            )
            assert "can't serialize" in str(bad)
            assert good.token_ids == [5] * 12
            assert (await engine.generate([6], SHORT)).token_ids == [5] * 12

    asyncio.run(main())


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    config = GenerationConfig(
        max_new_tokens=np.int64(3), temperature=np.float64(0.5), do_sample=True, stop_token_ids=[np.int32(400)]
    )
    with scripted() as pipe:
        assert pipe.infer("abc", config).generate_token_len == 3


def test_a_ban_of_every_token_is_refused():
    with scripted() as pipe, pytest.raises(InvalidRequest, match="bad_token_ids leaves no token"):
        pipe.infer("abc", GenerationConfig(bad_token_ids=list(range(512))))


def test_the_last_no_steps_are_none():
    with scripted() as pipe:
        pipe.infer("abc", SHORT)
        assert pipe.step_log(0) == []
        with pytest.raises(InvalidRequest, match="-1"):
            pipe.step_log(-1)


def test_a_history_that_is_none_frees_the_session():
    with scripted() as pipe:
        session = pipe.session()
        session.history = None
        with pytest.raises(InvalidRequest, match="messages"):
            pipe.chat("abc", session)
        session.history = []
        with pytest.raises(InvalidRequest, match=r"chat template|raw text"):  # the scripted model has none
            pipe.chat("abc", session)
