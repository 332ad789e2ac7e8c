"""A real worker process behind the engine: answers, deaths, bad starts, hostile surroundings."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from corogen.config import EngineConfig
from corogen.engine import Engine
from corogen.errors import CheckpointError, WorkerDied, WorkerStartError
from corogen.params import GenerationConfig
from corogen.testing.tiny import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"), with_tokenizer=True)


def make(tiny, **options):
    return Engine(str(tiny), EngineConfig(device_type="cpu", max_batch_size=8, num_gpu_blocks=256, **options))


LONG = GenerationConfig(max_new_tokens=200, ignore_eos=True)


async def test_a_worker_process_and_the_inline_executor_give_the_same_ids(tiny):
    config = GenerationConfig(max_new_tokens=20, ignore_eos=True)
    prompts = [[i, 2, 3, 5 + i] for i in range(1, 9)]
    answers = []
    for backend in ("mp", "uni"):
        async with make(tiny, distributed_executor_backend=backend) as engine:
            answers.append([a.token_ids for a in await asyncio.gather(*(engine.generate(p, config) for p in prompts))])
    assert answers[0] == answers[1]
    assert all(len(ids) == 20 for ids in answers[0])


async def test_a_killed_worker_is_replaced_and_its_requests_go_on_with_the_same_tokens(tiny):
    async with make(tiny) as engine:
        undisturbed = await engine.generate([1, 2, 3], LONG)
        stream = engine.stream([1, 2, 3], LONG)
        ids = (await anext(stream)).token_ids
        os.kill(engine._executor.pids[0], signal.SIGKILL)
        async for piece in stream:
            ids += piece.token_ids
        assert ids == undisturbed.token_ids
        assert engine.stats().restarts == 1


async def test_with_the_policy_fail_the_error_has_rank_and_signal(tiny):
    async with make(tiny, on_worker_failure="fail") as engine:
        stream = engine.stream([1, 2, 3], LONG)
        await anext(stream)
        os.kill(engine._executor.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="worker 0 ended with signal 9") as caught:
            async for _ in stream:
                pass
        assert (caught.value.rank, caught.value.exit_code) == (0, -9)
        assert (await engine.generate([1], GenerationConfig(max_new_tokens=3))).generate_token_len > 0


async def test_closing_leaves_no_process(tiny):
    engine = make(tiny)
    await engine.start()
    pid = engine._executor.pids[0]
    await engine.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_worker_that_can_not_load_reports_its_own_error_and_leaves(tiny, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-100])
    engine = make(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        await engine.start()
    assert engine._executor._worker._process.returncode is not None


async def test_a_start_that_takes_too_long_names_its_phase(tiny):
    engine = make(tiny, start_timeout_s=0.05)
    with pytest.raises(WorkerStartError, match=r"phase '\w+' after start_timeout_s=0.05"):
        await engine.start()
    assert engine._executor._worker._process.returncode is not None


async def test_a_step_that_takes_too_long_is_named(tiny):
    async with make(tiny, on_worker_failure="fail") as engine:
        engine._executor._step_timeout_s = 0.3
        os.kill(engine._executor.pids[0], signal.SIGSTOP)
        with pytest.raises(Exception, match=r"took longer than step_timeout_s=0.3"):
            await engine.generate([1, 2, 3])


def run_script(code, cwd, **env):
    # generous: a slow machine imports torch and transformers in the worker
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_hostile_working_directory_does_not_reach_the_worker(tiny, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('the working directory was imported')")
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the working directory was imported')")
    (tmp_path / "corogen").mkdir()
    (tmp_path / "corogen" / "__init__.py").write_text("raise SystemExit('the working directory was imported')")
    code = f"""
        import sys
        sys.path.remove("")  # the script itself does not look there, the worker must not either
        import asyncio
        from corogen.engine import Engine
        async def main():
            async with Engine({str(tiny)!r}) as engine:
                print((await engine.generate([1, 2, 3])).generate_token_len)
        asyncio.run(main())
        """
    done = run_script(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_workers_end_when_the_parent_is_killed(tiny, tmp_path):
    code = f"""
        import asyncio, os, signal
        from corogen.engine import Engine
        async def main():
            async with Engine({str(tiny)!r}) as engine:
                print(engine._executor.pids[0], flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
        """
    done = run_script(code, tmp_path)
    pid = int(done.stdout)
    for _ in range(100):
        if not _alive(pid):
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError("the worker outlived its parent")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
