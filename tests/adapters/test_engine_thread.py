"""The engine's own thread: its start, its end, and what is left."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from corogen.adapters import EngineThread
from corogen.config import EngineConfig
from corogen.errors import BlockingCallError, ConfigError, EngineClosed, ModelNotFound
from corogen.testing import FakeExecutor
from tests.adapters.helpers import SHORT, expected, make_pipe
from tests.conftest import eventually, open_files, threads
from tests.engine.helpers import repeats_the_prompt, tokenizer

pytestmark = pytest.mark.usefixtures("no_threads_left")

ROOT = Path(__file__).resolve().parents[2]


def make_thread(executor=None, **options):
    return EngineThread(executor=executor or FakeExecutor(repeats_the_prompt), tokenizer=tokenizer(), **options)


class TestRunning:
    def test_coroutines_from_any_thread(self):
        with make_thread() as thread:
            assert thread.run(thread.engine.generate("x", SHORT)).text == expected("x")
            future = asyncio.run_coroutine_threadsafe(thread.engine.generate("y", SHORT), thread.loop)
            assert future.result(5).text == expected("y")

    def test_raises_what_the_coroutine_raises(self):
        async def fail():
            raise LookupError("mine")

        with make_thread() as thread, pytest.raises(LookupError, match="mine"):
            thread.run(fail())

    def test_is_refused_on_its_own_loop_and_leaves_no_coroutine_behind(self):
        with make_thread() as thread:

            async def nested():
                with pytest.raises(BlockingCallError):
                    thread.run(asyncio.sleep(0))

            thread.run(nested())

    def test_is_refused_after_the_end(self):
        thread = make_thread()
        thread.close()
        with pytest.raises(EngineClosed):
            thread.run(asyncio.sleep(0))

    def test_ends_with_the_thread(self):
        thread = make_thread()
        failures = []

        def wait():
            try:
                thread.run(asyncio.Event().wait())
            except EngineClosed as error:
                failures.append(error)

        waiters = [threading.Thread(target=wait) for _ in range(4)]
        for waiter in waiters:
            waiter.start()
        eventually(lambda: len(thread._control._waiting) == 4)
        thread.close()
        for waiter in waiters:
            waiter.join(5)
        assert len(failures) == 4

    def test_uses_uvloop_and_no_other_thread_notices(self):
        with make_thread() as thread:
            assert type(thread.loop).__module__.startswith("uvloop")
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        assert not type(asyncio.get_event_loop_policy()).__module__.startswith("uvloop")

    def test_does_without_uvloop(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "uvloop", None)
        monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
        with make_pipe() as pipe:
            assert isinstance(pipe.thread.loop, asyncio.SelectorEventLoop)
            assert pipe.infer("x", SHORT).text == expected("x")
            assert asyncio.run(pipe.async_batch_infer("x", SHORT), debug=True).text == expected("x")


class TestStarting:
    def test_refuses_a_bad_config_before_there_is_a_thread(self):
        before = threads()
        with pytest.raises(ConfigError):
            make_thread(config=EngineConfig(tp=0))
        assert threads() == before

    def test_raises_what_fails_as_itself(self):
        class Failing(FakeExecutor):
            async def start(self, spec, on_phase):
                raise ModelNotFound("no such thing")

        with pytest.raises(ModelNotFound, match="no such thing"):
            make_thread(Failing())

    def test_reports_its_phases(self):
        phases = []
        with make_thread(progress=phases.append):
            assert [phase.name for phase in phases] == ["load"]

    def test_ctrl_c_while_loading_leaves_nothing(self):
        class Slow(FakeExecutor):
            closed = False

            async def start(self, spec, on_phase):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                await asyncio.Event().wait()

        with pytest.raises(KeyboardInterrupt):
            make_thread(Slow())


class TestEnding:
    def test_is_idempotent_from_many_threads(self):
        thread = make_thread()
        closers = [threading.Thread(target=thread.close) for _ in range(8)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(5)
        thread.close()
        assert thread.closed

    def test_cleans_up_tasks_generators_and_the_default_executor_of_its_loop(self):
        thread, ends = make_thread(), []

        async def generator():
            try:
                yield 1
            finally:
                ends.append("generator")

        async def task():
            try:
                await asyncio.Event().wait()
            finally:
                ends.append("task")

        kept = generator()

        async def leave_things_behind():
            asyncio.create_task(task())  # noqa: RUF006
            await anext(kept)
            await asyncio.to_thread(int)

        thread.run(leave_things_behind())
        thread.close()
        assert sorted(ends) == ["generator", "task"]

    def test_dropping_the_last_reference_ends_the_thread(self):
        before = threads()
        thread = make_thread()
        assert threads() - before
        del thread
        gc.collect()
        assert eventually(lambda: not threads() - before)

    def test_ten_cycles_leave_no_thread_and_no_file(self):
        make_pipe().close()
        before, files = threads(), open_files()
        for _ in range(10):
            with make_pipe() as pipe:
                pipe.infer(["a", "b"], SHORT)
                asyncio.run(pipe.async_batch_infer("x", SHORT))
        gc.collect()
        assert threads() == before
        assert open_files() == files

    def test_a_loop_that_somebody_stops_fails_who_waits(self, caplog):
        pipe = make_pipe(fake={"step_time_s": 30.0})
        future = pipe.submit("x", SHORT)
        pipe.thread.loop.call_soon_threadsafe(pipe.thread.loop.stop)
        assert isinstance(future.exception(10), EngineClosed)
        pipe.close()
        assert "stopped" in caplog.text


class TestIdle:
    @pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
    def test_the_thread_is_never_woken(self):
        with make_pipe() as pipe:
            pipe.infer("x", SHORT)
            asyncio.run(pipe.async_batch_infer("x", SHORT))
            native = pipe.thread._thread.native_id

            def switches():
                status = Path(f"/proc/self/task/{native}/status").read_text()
                return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])

            time.sleep(0.05)
            settled = switches()
            time.sleep(0.3)  # the time in which nothing may happen
            assert switches() == settled


def run_script(source, timeout=20, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "PYTHONASYNCIODEBUG": "0"}
    return subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
        **options,
    )


PREAMBLE = """
import asyncio, threading
from tests.adapters.helpers import *
pipe = make_pipe(fake={"step_time_s": 0.001})
"""


@pytest.mark.parametrize(
    "leave",
    {
        "idle": "asyncio.run(pipe.async_batch_infer('x', SHORT))",
        "running future": "future = pipe.submit('x', ENDLESS)",
        "open stream": "stream = pipe.stream_infer('x', ENDLESS); next(stream)",
        "waiting daemon thread": "threading.Thread(target=pipe.infer, args=('x', ENDLESS), daemon=True).start()",
        "queue adapter": "import queue; from corogen.adapters import QueueAdapter; a = queue.Queue();"
        "QueueAdapter(pipe).add(a, queue.Queue()); a.put('x')",
        "exception": "raise SystemExit(0)",
    }.values(),
)
def test_a_program_that_closes_nothing_ends_at_once_and_without_a_word(leave):
    start = time.monotonic()
    done = run_script(PREAMBLE + leave)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - start < 10


def test_signal_handlers_stay_what_they_were():
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    with make_pipe() as pipe:
        pipe.infer("x", SHORT)
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers
