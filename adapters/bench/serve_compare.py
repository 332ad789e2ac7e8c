"""What HTTP costs: the same requests to a server of ours in a process of its own, and to a pipeline in this one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from corogen.adapters.bench.figures import spread
from corogen.adapters.bench.http_client import HttpPool
from corogen.adapters.bench.serve import Ask, Outcome, Target, ask_one
from corogen.adapters.bench.workload import read_stream, story_prompts, stream_all
from corogen.errors import WorkerStartError
from corogen.params import GenerationConfig

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

_ADDRESS = re.compile(r"serving .* on (http\S+)")


@contextlib.contextmanager
def server_process(model: str, *options: str) -> Iterator[str]:
    """`corogen serve` as a process; yields its address.

    Raises:
        WorkerStartError: it ended instead; with its words.
    """
    command = [sys.executable, "-m", "corogen", "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            yield _address(process)
        finally:
            process.terminate()
            process.communicate()


def _address(process: subprocess.Popen[str]) -> str:
    said = []
    for line in process.stderr or ():
        said.append(line)
        if found := _ADDRESS.search(line):
            return found[1]
    raise WorkerStartError("the server did not start:\n" + "".join(said))


def measure(
    pipe: Pipeline, url: str, *, count: int, output_len: int, pairs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Alternating pairs: one request alone (TTFT), and `count` at once (seconds to the last answer). JSON-ready.

    Both sides stream. Prompts differ from pair to pair, so that none is cached as a whole.
    """
    config = GenerationConfig(max_new_tokens=output_len, ignore_eos=True)
    target = Target(url, extra={"ignore_eos": True})

    async def compare() -> dict[str, Any]:
        async with target.client() as client:
            one = await _pairs(
                pairs,
                lambda i: _ttft_here(pipe, _alone(i), config),
                lambda i: _ttft_http(client, target, _alone(i), output_len),
            )
            say("one request alone: done")
            many = await _pairs(
                pairs,
                lambda i: _all_here(pipe, story_prompts(count, i + 1), config),
                lambda i: _all_http(client, target, story_prompts(count, i + 1), output_len),
            )
        added = [(http - here) * 1e3 for here, http in one]
        return {
            "pairs": pairs,
            "requests": count,
            "output_len": output_len,
            "ttft_ms": {"in_process": spread([a * 1e3 for a, _ in one]), "http": spread([b * 1e3 for _, b in one])},
            "ttft_added_ms": spread(added),
            "seconds": {"in_process": spread([a for a, _ in many]), "http": spread([b for _, b in many])},
            "seconds_ratio": spread([http / here for here, http in many]),
        }

    import uvloop

    return uvloop.run(compare())


Side = Callable[[int], Coroutine[Any, Any, float]]


async def _pairs(count: int, here: Side, http: Side) -> list[tuple[float, float]]:
    """Figures of both sides, in turns, the first of a pair by turns, too; after a pair that does not count."""
    found = []
    for i in range(count + 1):
        order = (here, http) if i % 2 else (http, here)
        values = {side: await side(i) for side in order}
        found.append((values[here], values[http]))
    return found[1:]


def _alone(number: int) -> Any:
    return story_prompts(1, number + 10_000)[0]


async def _ttft_here(pipe: Pipeline, prompt: Any, config: GenerationConfig) -> float:
    line, _ = await read_stream(pipe, prompt, config)
    return line.first


async def _ttft_http(client: HttpPool, target: Target, prompt: Any, output_len: int) -> float:
    return (await _succeeded(client, target, prompt, output_len)).ttft


async def _all_here(pipe: Pipeline, prompts: Sequence[Any], config: GenerationConfig) -> float:
    return (await stream_all(pipe, prompts, config)).seconds


async def _all_http(client: HttpPool, target: Target, prompts: Sequence[Any], output_len: int) -> float:
    start = time.perf_counter()
    await asyncio.gather(*(_succeeded(client, target, prompt, output_len) for prompt in prompts))
    return time.perf_counter() - start


async def _succeeded(client: HttpPool, target: Target, prompt: Any, output_len: int) -> Outcome:
    outcome = await ask_one(client, target, Ask(prompt, output_len))
    if outcome.error is not None:
        raise WorkerStartError(f"a request of the benchmark failed: {outcome.error}")
    return outcome
