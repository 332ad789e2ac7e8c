"""Many connections that open and close at random: health answers, and nothing stays behind."""

import asyncio
import os
import random
import re
import subprocess
import sys
import time

import httpx
import pytest

from tests.server.helpers import CHAT
from tests.server.test_lifecycle import ROOT, process, question


def value(text, name):
    return float(re.search(rf"^{name}\{{[^}}]*\}} (\S+)", text, re.MULTILINE)[1])


async def come_and_go(host, port, rng, until, rest):
    """Connections of one client: each asks, reads for a while or not at all, and is closed without a word."""
    while time.monotonic() < until:
        await asyncio.sleep(rng.random() * rest)
        body = httpx.Request(
            "POST", "http://x", json=question("word " * rng.randint(1, 100), stream=rng.random() < 0.5)
        )
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body.content)}"
        )
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(head.encode() + b"\r\n\r\n" + body.content[: rng.choice([None, None, None, 20])])
            await asyncio.wait_for(reader.read(rng.choice([1, 1000, 100_000])), rng.random())
        except (OSError, TimeoutError):
            pass
        finally:
            writer.close()


async def churn(url, clients, seconds, rest):
    until = time.monotonic() + seconds
    address = httpx.URL(url)
    rng = random.Random(1)
    tasks = [come_and_go(address.host, address.port, random.Random(rng.random()), until, rest) for _ in range(clients)]
    await asyncio.gather(*tasks)


def poll_health(url, clients):
    """Seconds that each answer took while the process of the clients runs; from a process that does nothing else."""
    took = []
    with httpx.Client(base_url=url, timeout=30) as http:
        while clients.poll() is None:
            start = time.monotonic()
            assert http.get("/health").status_code == 200
            took.append(time.monotonic() - start)
            time.sleep(0.05)
    assert clients.returncode == 0
    return sorted(took)


async def settled(url):
    """The metrics once nothing runs."""
    async with httpx.AsyncClient(base_url=url, timeout=10) as http:
        for _ in range(100):
            text = (await http.get("/metrics")).text
            if not value(text, "corogen_num_requests_running") + value(text, "corogen_num_requests_waiting"):
                return text
            await asyncio.sleep(0.05)
    raise AssertionError(text)


@pytest.mark.parametrize(
    ("clients", "seconds", "rest", "bound"),
    [(40, 1.5, 0.2, 2.0), pytest.param(500, 120, 6.0, 1.0, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def test_health_answers_throughout_and_every_block_comes_back(clients, seconds, rest, bound):
    with process() as (_, url):
        command = [sys.executable, "-m", "tests.server.test_churn", url, str(clients), str(seconds), str(rest)]
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as program:
            took = poll_health(url, program)
        text = asyncio.run(settled(url))
    shown = {share: round(took[int((len(took) - 1) * share)] * 1e3, 1) for share in (0.5, 0.9, 0.99, 1)}
    print(f"{len(took)} polls, milliseconds by share: {shown}")
    assert took[-1] < bound  # the machine also runs the clients
    assert value(text, "corogen_kv_cache_usage_perc") == 0
    for line in text.splitlines():
        if line.startswith("corogen_requests_ended"):
            print(line)


if __name__ == "__main__":
    where, count, length, pause = sys.argv[1:]
    asyncio.run(churn(where, int(count), float(length), float(pause)))
