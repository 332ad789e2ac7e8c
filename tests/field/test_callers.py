"""Loops, threads and processes around an engine: public failures of other engines, as they should have gone."""

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from corogen.errors import QueueFullError
from corogen.params import GenerationConfig
from corogen.testing.tiny import tiny_model
from tests.adapters.helpers import ENDLESS, SHORT, assert_nothing_runs, expected, make_pipe, scripted, slowly
from tests.conftest import eventually, open_files, threads

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("no_threads_left")
class TestScripted:
    def test_two_synchronous_calls_in_a_row_and_twenty_more(self):
        """sgl-project/sglang#1606: the second synchronous call found a loop that the first had closed."""
        with scripted() as pipe:
            config = GenerationConfig(max_new_tokens=8)
            answers = [pipe.infer("2+3=", config).text for _ in range(22)]
            assert answers == [expected("2+3=", config)] * 22
            start = time.monotonic()
        assert time.monotonic() - start < 2

    def test_synchronous_then_loops_of_every_origin(self):
        """sgl-project/sglang#5162: an engine that was bound to the loop which used it first."""
        with scripted() as pipe:
            answers = [pipe.infer("2+3=", SHORT).text]
            loop = asyncio.new_event_loop()
            answers.append(loop.run_until_complete(pipe.async_batch_infer("2+3=", SHORT)).text)
            loop.close()
            answers.append(asyncio.run(pipe.async_batch_infer("2+3=", SHORT)).text)
            together = threading.Barrier(2)

            def in_a_thread():
                async def main():
                    together.wait(10)
                    return (await pipe.async_batch_infer("2+3=", SHORT)).text

                return asyncio.run(main())

            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                answers += [f.result(10) for f in [pool.submit(in_a_thread) for _ in range(2)]]
            assert answers == [expected("2+3=")] * 5

    def test_a_synchronous_call_inside_a_running_loop(self):
        """InternLM/lmdeploy#1399: "this event loop is already running"."""
        with scripted() as pipe:

            async def main():
                return pipe(["Who are you?", "Paris is"], SHORT)

            assert [a.text for a in asyncio.run(main())] == [expected("Who are you?"), expected("Paris is")]

    def test_five_threads_that_stream_are_one_batch(self):
        """InternLM/lmdeploy#2134: threads that streamed mixed up their answers or ran one after the other."""
        config = GenerationConfig(max_new_tokens=64, ignore_eos=True)
        with slowly() as pipe, concurrent.futures.ThreadPoolExecutor(5) as pool:
            alone = "".join(piece.text for piece in pipe.stream_infer("hello", config))
            together = threading.Barrier(5)

            def rounds(_):
                together.wait(10)
                return ["".join(p.text for p in pipe.stream_infer("hello", config)) for _ in range(10)]

            for texts in pool.map(rounds, range(5)):
                assert texts == [alone] * 10
            assert max(record.running for record in pipe.step_log(4096)) == 5
            assert pipe.stats().steps < 64 * 50 / 3

    def test_an_engine_in_a_thread_leaves_signals_alone(self):
        """vllm-project/vllm#13806: "signal only works in main thread"."""
        seen = []
        before = signal.signal(signal.SIGINT, lambda *args: seen.append(args))
        try:
            mine, answers = signal.getsignal(signal.SIGINT), []

            def own_engine():
                with make_pipe() as pipe:
                    answers.append(pipe.infer("Hello", SHORT).text)

            thread = threading.Thread(target=own_engine)
            thread.start()
            thread.join(10)
            assert answers == [expected("Hello")]
            assert signal.getsignal(signal.SIGINT) is mine
        finally:
            signal.signal(signal.SIGINT, before)

    def test_an_engine_that_a_web_application_opens_in_its_start_up(self):
        """vllm-project/vllm#13806, in the thread of an application's start-up."""
        from fastapi import FastAPI
        from fastapi.testclient import TestClient

        @contextlib.asynccontextmanager
        async def lifespan(app):
            async with make_pipe() as app.state.pipe:
                yield

        app = FastAPI(lifespan=lifespan)

        @app.get("/async")
        async def in_a_coroutine(q: str):
            return (await app.state.pipe.async_batch_infer(q, SHORT)).text

        @app.get("/sync")
        def in_a_thread(q: str):
            return app.state.pipe.infer(q, SHORT).text

        with TestClient(app) as client:
            assert client.get("/async", params={"q": "Hello"}).json() == expected("Hello")
            assert client.get("/sync", params={"q": "Hello"}).json() == expected("Hello")

    def test_thirty_two_threads_encode_while_the_engine_decodes(self):
        """vllm-project/vllm#40949: "Already borrowed", from a tokenizer that several threads used."""
        with scripted(max_batch_size=64) as pipe, concurrent.futures.ThreadPoolExecutor(32) as pool:
            prompts = [(f"{i} wörter und 词 " * 40)[:500] for i in range(32)]
            admission = pipe.engine.admission
            serial = [admission.prepare(prompt).prompt_ids for prompt in prompts]
            config = GenerationConfig(max_new_tokens=40, stop_words=["no such thing ☃"])
            running = [pipe.submit(prompt, config) for prompt in prompts]

            def encode(i):
                for _ in range(5):
                    assert admission.prepare(prompts[i]).prompt_ids == serial[i]
                return pipe.infer(prompts[i], config).text

            texts = list(pool.map(encode, range(32)))
            assert texts == [f.result(20).text for f in running]
            assert texts == [pipe.infer(prompt, config).text for prompt in prompts]

    @pytest.mark.parametrize("way", ["break", "cancel", "drop"])
    def test_leaving_a_stream_frees_its_blocks(self, way, caplog):
        """vllm-project/vllm#19225: a generator that was left went on generating."""
        with slowly() as pipe:
            baseline = pipe.stats().blocks_used

            async def three(stream):
                async for _ in stream:
                    three.seen += 1
                    if way == "break" and three.seen == 3:
                        break
                    if way == "cancel":
                        await asyncio.sleep(60)
                    if way == "drop" and three.seen == 3:
                        return

            async def main():
                three.seen = 0
                stream = pipe.async_stream_infer("endless", ENDLESS)
                task = asyncio.create_task(three(stream))
                if way != "cancel":
                    await task
                    if way == "break":
                        await stream.aclose()
                        await stream.aclose()
                else:
                    while not three.seen:
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                del task, stream
                gc.collect()

            asyncio.run(main(), debug=True)
            assert_nothing_runs(pipe)
            assert pipe.stats().blocks_used == baseline
            assert not [r for r in caplog.records if r.name == "asyncio" and "took" not in r.message]

    def test_one_task_reads_while_another_closes_or_aborts(self):
        """vllm-project/vllm#6325: "aclose(): asynchronous generator is already running"."""
        with scripted() as pipe:

            async def once(turns, close):
                stream = pipe.async_stream_infer("x", ENDLESS, request_id="mine")

                async def read():
                    return [piece.finish_reason async for piece in stream]

                reader = asyncio.create_task(read())
                for _ in range(turns):
                    await asyncio.sleep(0)
                for _ in range(2):
                    await stream.aclose() if close else pipe.abort("mine")
                assert (await reader)[-1] == "abort"
                await stream.aclose()
                pipe.abort("mine")

            async def main():
                for turn in range(300):
                    await once(turn % 7, turn % 2)

            asyncio.run(main())

    def test_making_and_closing_leaves_nothing(self):
        """vllm-project/vllm#1908: memory, threads and files of an engine that was deleted."""
        with make_pipe() as pipe:
            pipe.infer("x", SHORT)
        before, files = threads(), open_files()
        for _ in range(5):
            with make_pipe() as pipe:
                pipe.infer("x", SHORT)
        assert eventually(lambda: threads() == before)
        assert open_files() == files

    def test_twenty_at_once_where_five_are_allowed(self):
        """vllm-project/vllm#18826: a queue without a bound. Locally the refusal is an error of its own type."""
        with slowly(queue_size=5, max_batch_size=1) as pipe:
            futures, refused = [], 0
            for i in range(20):
                try:
                    futures.append(pipe.submit(f"p{i}", SHORT))
                except QueueFullError:
                    refused += 1
            assert refused == 20 - len(futures) > 0
            assert [f.result(10).text for f in futures] == [expected(f"p{i}") for i in range(len(futures))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A real, random model of a few kilobytes."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", with_tokenizer=True)


def run_script(source, *, cwd, stdin=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-"] if stdin else [sys.executable, "-c", source]
    start = time.monotonic()
    done = subprocess.run(
        command,
        input=source if stdin else None,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, time.monotonic() - start


SCRIPT = """
import asyncio, time
from corogen import GenerationConfig, pipeline

async def main():
    pipe = pipeline({model!r}, device_type="cpu", num_gpu_blocks=64, log_level="ERROR")
    config = GenerationConfig(max_new_tokens=8, ignore_eos=True)
    answers = await asyncio.gather(*(pipe.async_batch_infer([5, 6, n], config) for n in range(7, 10)))
    print(max(record.running for record in pipe.step_log()), [len(a.token_ids) for a in answers], flush=True)
    return time.monotonic()

print(asyncio.run(main()))
"""


@pytest.mark.parametrize("stdin", [False, True], ids=["-c", "stdin"])
def test_a_program_that_never_closes_its_engine_ends(tiny, tmp_path, stdin):
    """vllm-project/vllm#3996: a program that hung at its end. vllm-project/vllm#5637: no guard around the main code."""
    done, _ = run_script(SCRIPT.format(model=str(tiny)), cwd=tmp_path, stdin=stdin)
    ended = time.monotonic()
    assert (done.returncode, done.stderr) == (0, "")
    figures, main_done = done.stdout.splitlines()
    assert figures == "3 [8, 8, 8]"
    assert ended - float(main_done) < 5
