"""The two programs of LMDeploy's guide on concurrency (docs/en/advance/pytorch_multithread.md), and what they claim."""

import ast
import asyncio
import queue
import threading
from pathlib import Path

import pytest

from corogen.errors import ConfigError
from tests.adapters.helpers import SHORT, expected, make_pipe, slowly
from tests.engine.helpers import tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "added"), [("async_gather.py", {"GenerationConfig"}), ("threads_queues_as_published.py", set())]
)
def test_only_the_import_line_names_this_library(name, added):
    """The first one also bounds its answers, with a class of the same name and field as LMDeploy's."""
    tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("corogen")
        for alias in node.names
    }
    assert imported == {"pipeline", "PytorchEngineConfig"} | added


def test_a_bridge_of_coroutines_and_queues_in_the_servers_own_loop():
    """The second program with an end: the pipeline is made inside the server's thread, after its loop was set."""
    asked = [queue.Queue(), queue.Queue()]
    answered = [queue.Queue(), queue.Queue()]
    leave = threading.Event()

    async def carry(inbox, outbox, pipe):
        while not leave.is_set():
            if inbox.empty():
                await asyncio.sleep(0)
                continue
            outbox.put(await pipe.async_batch_infer(inbox.get_nowait(), SHORT))

    def server():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        with make_pipe(tok=tokenizer()) as pipe:
            tasks = [loop.create_task(carry(*pair, pipe)) for pair in zip(asked, answered, strict=True)]
            loop.run_until_complete(asyncio.gather(*tasks))
        asyncio.set_event_loop(None)
        loop.close()

    thread = threading.Thread(target=server)
    thread.start()
    messages = ["Hakuna Matata", "giraffes are heartless creatures"]
    for inbox, message in zip(asked, messages, strict=True):
        inbox.put(message)
    assert [outbox.get(timeout=10).text for outbox in answered] == list(map(expected, messages))
    leave.set()
    thread.join(10)


def test_requests_that_are_gathered_run_as_one_batch():
    with slowly() as pipe:

        async def main():
            return await asyncio.gather(*(pipe.async_batch_infer(f"prompt {i}", SHORT) for i in range(10)))

        assert [a.text for a in asyncio.run(main())] == [expected(f"prompt {i}") for i in range(10)]
        assert max(record.running for record in pipe.step_log()) > 5


def test_the_semaphore_is_the_engines_own():
    """More coroutines than `max_batch_size`: nothing has to be limited by hand."""
    with slowly(max_batch_size=4) as pipe:

        async def main():
            return await asyncio.gather(*(pipe.async_batch_infer(f"prompt {i}", SHORT) for i in range(50)))

        assert [a.text for a in asyncio.run(main())] == [expected(f"prompt {i}") for i in range(50)]
        assert max(record.running for record in pipe.step_log(4096)) == 4


def test_thread_safe_is_refused_by_an_exception_and_not_by_exit():
    with pytest.raises(ConfigError, match="async_batch_infer"):
        make_pipe(thread_safe=True)
