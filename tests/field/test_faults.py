"""Workers that fail and memory that runs short: public failures of other engines, as they should have gone."""

import asyncio
import multiprocessing
import queue
import subprocess
import sys
import threading

import pytest

from corogen.adapters.queues import QueueAdapter
from corogen.engine import Engine
from corogen.errors import EngineClosed, RequestFailed, StepFailed, WorkerDied
from corogen.params import GenerationConfig
from corogen.recovery import State
from corogen.testing import FakeExecutor
from corogen.testing.tiny import tiny_model
from tests.adapters.helpers import SHORT, expected, scripted
from tests.adapters.test_pipeline import every_caller
from tests.conftest import eventually
from tests.engine.helpers import assert_idle, make_engine, settle

PROMPTS = ["abc", "xyz", "Hakuna"]


@pytest.mark.usefixtures("no_threads_left")
class TestAFaultInAStep:
    """vllm-project/vllm#5060 and huggingface/transformers#22576: who hears of it, in every adapter."""

    @every_caller
    def test_nobody_by_default(self, call):
        faults = {3: RuntimeError("boom"), 6: WorkerDied(0, -9)}
        with scripted(fake={"fail_at": faults}) as pipe:
            assert [a.text for a in call(pipe, PROMPTS, SHORT)] == [expected(p) for p in PROMPTS]
            assert call(pipe, "abc", SHORT).text == expected("abc")
            assert pipe.stats().restarts == 1

    @every_caller
    @pytest.mark.parametrize("fault", [RuntimeError("boom"), WorkerDied(0, -9, "last words")], ids=["raises", "dies"])
    def test_those_that_ran_when_that_is_wanted_and_later_ones_are_served(self, call, fault):
        with scripted(fake={"fail_at": {3: fault}}, on_worker_failure="fail") as pipe:
            with pytest.raises((StepFailed, WorkerDied), match=r"boom|last words"):
                call(pipe, "abc", SHORT)
            assert call(pipe, "abc", SHORT).text == expected("abc")

    def test_a_consumer_in_a_thread_gets_its_tokens_and_then_the_error(self):
        with scripted(fake={"fail_at": {3: RuntimeError("boom")}}, on_worker_failure="fail") as pipe:
            stream, text = pipe.stream_infer("abc", SHORT), ""
            with pytest.raises(StepFailed, match="boom"):
                for piece in stream:
                    text += piece.text
            assert text == "abc"
            assert list(stream) == []

    def test_a_queue_gets_the_error_in_its_place_and_goes_on(self):
        inbox, outbox = queue.Queue(), queue.Queue()
        with (
            scripted(fake={"fail_at": {3: RuntimeError("boom")}}, on_worker_failure="fail") as pipe,
            QueueAdapter(pipe, SHORT) as bridge,
        ):
            bridge.add(inbox, outbox)
            inbox.put("abc")
            assert isinstance(outbox.get(timeout=10), StepFailed)
            inbox.put("xyz")
            assert outbox.get(timeout=10).text == expected("xyz")

    @every_caller
    def test_one_requests_own_fault_spares_the_others(self, call, monkeypatch):
        from corogen import request

        whole = request.ActiveRequest.advance

        def advance(active, token):
            if active.seq.prompt_len == 3 and len(active.seq.tokens) > 6:
                raise ValueError("of this request alone")
            return whole(active, token)

        monkeypatch.setattr(request.ActiveRequest, "advance", advance)
        with scripted() as pipe:
            bad, good = call(pipe, ["abc", "Hakuna"], SHORT)
            assert (bad.error_code, good.text) == (RequestFailed.code, expected("Hakuna"))
            assert "of this request alone" in bad.error_message

    def test_workers_that_never_come_back_refuse_new_requests_with_the_first_cause(self, monkeypatch):
        from corogen import recovery

        class Gone(FakeExecutor):
            starts = 0

            async def start(self, spec, on_phase):
                self.starts += 1
                if self.starts > 1:
                    raise recovery.WorkerError("no such device")
                return await super().start(spec, on_phase)

        monkeypatch.setattr(recovery, "_BACKOFF_S", 0.001)

        async def main():
            engine = Engine(executor=Gone(fail_at={2: WorkerDied(0, -9)}))
            await engine.start()
            with pytest.raises(recovery.WorkerError):
                await engine.generate([5, 6, 7])
            assert engine.health.state is State.FAILED
            with pytest.raises(EngineClosed, match=r"no such device|signal 9"):
                engine.stream([5])
            await engine.aclose()

        asyncio.run(main())


class TestScarceBlocks:
    async def test_a_prompt_larger_than_the_cache_is_refused_and_the_next_is_served(self):
        """vllm-project/vllm#39734: a prompt that fits the model and not the cache waited for ever."""
        from corogen.errors import PromptTooLong

        async with make_engine(fake={"num_blocks": 8, "max_positions": 256}) as engine:
            with pytest.raises(PromptTooLong, match="200"):
                await engine.generate([5] * 200)
            assert (await engine.generate([6] * 10, SHORT)).generate_token_len == 12

    async def test_an_answer_that_outgrows_the_cache_ends_by_length(self):
        """The same report: what fits at the start and not at the end."""
        async with make_engine(fake={"num_blocks": 8, "max_positions": 256}) as engine:
            answer = await engine.generate([5] * 100, GenerationConfig(max_new_tokens=100))
            assert answer.finish_reason == "length"
            assert answer.generate_token_len == 28

    @pytest.mark.parametrize("priority", [0, 1])
    async def test_eight_requests_over_blocks_for_two_all_finish(self, priority):
        """vllm-project/vllm#15996: a deadlock between running and waiting requests."""
        async with make_engine(fake={"num_blocks": 10}, enable_prefix_caching=False) as engine:
            configs = [GenerationConfig(max_new_tokens=60, priority=i % 2 * priority) for i in range(8)]
            prompts = [[5 + i] * 20 for i in range(8)]
            answers = await asyncio.wait_for(
                asyncio.gather(*(engine.generate(p, c) for p, c in zip(prompts, configs, strict=True))), 60
            )
            assert [a.token_ids for a in answers] == [[5 + i] * 60 for i in range(8)]
            assert engine.stats().preemptions > 0
            assert all(record.prefill_rows + record.decode_rows for record in engine.step_log(4096))
            await settle(engine)
            assert_idle(engine)

    async def test_a_long_prompt_comes_in_chunks_between_the_tokens_of_running_streams(self):
        """vllm-project/vllm#1026: running streams stood still while a long prompt was computed."""
        async with make_engine(max_prefill_token_num=32, max_batch_size=8) as engine:
            running = [
                asyncio.create_task(engine.generate([5 + i], GenerationConfig(max_new_tokens=200))) for i in range(4)
            ]
            while engine.stats().running < 4:
                await asyncio.sleep(0)
            long = await engine.generate([9] * 256, SHORT)
            answers = await asyncio.gather(*running)
            assert [set(a.token_ids) for a in answers] == [{5}, {6}, {7}, {8}]
            assert long.generate_token_len == 12
            chunks = [r for r in engine.step_log(4096) if r.prefill_rows and r.running == 5]
            assert len(chunks) >= 256 / 32
            assert all(r.decode_rows == 4 for r in chunks)


class TestProcesses:
    def test_ctrl_c_at_any_time_ends_with_130_and_leaves_no_child(self, tmp_path):
        """vllm-project/vllm#19196: children and ports that outlived an interrupted start."""
        import psutil

        tiny_model(tmp_path / "model", with_tokenizer=True)
        command = [sys.executable, "-m", "corogen", "run", "-m", str(tmp_path / "model"), "x"]
        for wait_for in (b"loading", None):
            program = subprocess.Popen(
                [*command, "--max-new-tokens", "200"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
            )
            with program:
                (program.stderr if wait_for else program.stdout).read(4)
                children = psutil.Process(program.pid).children(recursive=True)
                program.send_signal(2)
                _, err = program.communicate(timeout=20)
            assert program.returncode in (130, 0 if wait_for is None else 130), err
            assert b"Traceback" not in err
            assert eventually(lambda children=children: not any(map(psutil.Process.is_running, children)))

    def test_a_host_that_has_torch_threads_and_forks_by_default_is_not_forked(self, tmp_path):
        """vllm-project/vllm#12754: a forked worker inherited a GPU context, or a lock that nobody would release."""
        import torch

        torch.ones(8, 8) @ torch.ones(8, 8)
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("fork", force=True)
        try:

            async def main():
                async with Engine(str(tiny_model(tmp_path, with_tokenizer=True))) as engine:
                    return await engine.generate([1, 2, 3], GenerationConfig(max_new_tokens=3, ignore_eos=True))

            assert asyncio.run(main()).generate_token_len == 3
        finally:
            multiprocessing.set_start_method(before, force=True)
            stop.set()
            thread.join()
