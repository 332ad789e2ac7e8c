"""Every example runs: over a scripted model in a moment, and with the demo model's real weights."""

import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.adapters.helpers import assert_nothing_runs
from tests.adapters.scripted_main import said, script_every_engine
from tests.conftest import eventually
from tests.server.test_lifecycle import process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

#: what the scripted model lets each program print
PRINTED = {
    "async_gather.py": [said("Hakuna Matata"), said("giraffes are heartless creatures")],
    "threads_queue_adapter.py": [said("Hakuna Matata"), said("giraffes are heartless creatures")],
    "sync.py": [
        said("Hakuna Matata"),
        f"0 {said('Name three colours.')}",
        f"1 {said('Name three animals.')}",
        said("Tell me a story."),
        said("What is the capital of France?"),
        said("And of Japan?"),
    ],
    "futures_from_threads.py": [said(f"What is {n} plus {n}?") for n in range(8)],
    "trio_app.py": [said("Hakuna Matata"), said("What is the capital of France?"), said("Tell me a very long story.")],
    "bare_engine.py": [*(said(f"What is {n} plus {n}?") for n in range(4)), said("Tell me a story.")],
}

#: whose programs are run apart: one never ends, one is a server, one needs a server
APART = {"threads_queues_as_published.py", "fastapi_app.py", "openai_client.py"}


def start(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTED, *APART}


@pytest.mark.parametrize("name", PRINTED)
def test_prints_the_answers_and_ends_by_itself(name, tmp_path):
    with start("-m", "tests.adapters.scripted_main", EXAMPLES / name, cwd=tmp_path) as program:
        out, err = program.communicate(timeout=30)
    assert (program.returncode, err) == (0, "")
    assert_printed(out, PRINTED[name])


def assert_printed(out, lines):
    """Each of `lines`, and nothing else. Threads print at once, so their line ends may come late."""
    rest = out.replace("\n", "")
    for line in sorted(lines, key=len, reverse=True):
        assert line in rest
        rest = rest.replace(line, "", 1)
    assert rest == ""


def answers_of_the_published_program(*arguments, cwd, timeout):
    """What it prints, without line ends: its threads print at once, so lines may mix. It never ends: ended here."""
    with start(*arguments, cwd=cwd) as program:
        timer = threading.Timer(timeout, program.kill)
        timer.start()
        try:
            return "".join(program.stdout.readline().strip() for _ in range(2))
        finally:
            timer.cancel()
            program.kill()


def test_the_published_program_with_threads_and_queues_gets_both_answers(tmp_path):
    arguments = "-m", "tests.adapters.scripted_main", EXAMPLES / "threads_queues_as_published.py"
    answers = answers_of_the_published_program(*arguments, cwd=tmp_path, timeout=30)
    first, second = PRINTED["async_gather.py"]
    assert answers in (first + second, second + first)


#: whose run with real weights is part of every run of the suite; the others take minutes together
ALWAYS = {"async_gather.py", "sync.py"}


@pytest.mark.real_model
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in PRINTED]
)
def test_runs_with_the_demo_model(name, tmp_path):
    with start(EXAMPLES / name, cwd=tmp_path) as program:
        out, err = program.communicate(timeout=280)
    assert program.returncode == 0, err
    assert out.strip()
    if name == "sync.py":
        assert "Paris" in out


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_published_program_runs_with_the_demo_model(tmp_path):
    program = EXAMPLES / "threads_queues_as_published.py"
    assert answers_of_the_published_program(program, cwd=tmp_path, timeout=280)


def test_openais_client_asks_a_server_and_ends_by_itself(tmp_path):
    pytest.importorskip("openai")
    with process() as (_, url):
        environment = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1"}
        done = subprocess.run(
            [sys.executable, EXAMPLES / "openai_client.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stderr) == (0, "")
    questions = ["What is the capital of France?", "Name three colours.", *(f"What is {n} plus {n}?" for n in range(4))]
    assert done.stdout.splitlines() == [said(question) for question in questions]


def load_service():
    spec = importlib.util.spec_from_file_location("fastapi_app", EXAMPLES / "fastapi_app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def served(app):
    """The service under uvicorn on a free port, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert eventually(lambda: server.started, 20)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def service(monkeypatch):
    """The example service over a scripted model whose steps take a millisecond."""
    script_every_engine(monkeypatch, step_time_s=0.001)
    module = load_service()
    with served(module.app) as url:
        yield module.app, url
        assert_nothing_runs(module.app.state.pipe)


class TestService:
    def test_sixty_four_clients_get_their_answers(self, service):
        app, url = service

        async def main():
            limits = httpx.Limits(max_connections=64)
            async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:
                asked = [client.get("/ask", params={"question": f"number {i}"}) for i in range(64)]
                streamed = [client.get("/stream", params={"question": f"stream {i}"}) for i in range(64)]
                return await asyncio.gather(*asked), await asyncio.gather(*streamed)

        asked, streamed = asyncio.run(main())
        assert [answer.json() for answer in asked] == [{"text": said(f"number {i}")} for i in range(64)]
        assert [answer.text for answer in streamed] == [said(f"stream {i}") for i in range(64)]
        assert max(record.running for record in app.state.pipe.step_log(4096)) > 2

    @pytest.mark.parametrize("path", ["/ask", "/stream"])
    def test_a_client_that_leaves_ends_its_request(self, service, path):
        app, url = service
        question = {"question": "a long one " * 200, "max_new_tokens": 2000}

        async def main():
            async with httpx.AsyncClient(base_url=url) as client:
                task = asyncio.create_task(client.get(path, params=question))
                while not app.state.pipe.stats().running:
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.wait([task])

        asyncio.run(main())
        left = time.monotonic()
        assert_nothing_runs(app.state.pipe)
        assert time.monotonic() - left < 1
        assert app.state.pipe.stats().ended.get("abort") == 1

    def test_a_bad_question_is_the_clients_fault(self, service):
        _, url = service
        for path in ("/ask", "/stream"):
            answer = httpx.get(url + path, params={"question": ""})
            assert (answer.status_code, answer.json()["error"]) == (400, "empty_prompt")
            assert httpx.get(url + path, params={"question": "x", "max_new_tokens": -1}).status_code == 400
