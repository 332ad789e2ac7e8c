"""Load on a server that speaks OpenAI's API, ours or another: arrivals, streams, and what they say."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from corogen.adapters.bench.figures import Timeline, summary_ms
from corogen.adapters.bench.http_client import HttpPool

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

#: what may be bounded for goodput
OBJECTIVES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Target:
    """A server and how it is asked. `chat`: by /v1/chat/completions, else by /v1/completions."""

    url: str
    model: str | None = None
    api_key: str | None = None
    chat: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def client(self) -> HttpPool:
        """Connections to the server."""
        return HttpPool(self.url, {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"})

    def request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Path and body for one request."""
        body: dict[str, Any] = {"max_tokens": ask.output_len, "stream": True, "temperature": 0.0}
        body |= {"stream_options": {"include_usage": True}, **self.extra}
        if self.model is not None:
            body["model"] = self.model
        if self.chat:
            prompt = ask.prompt if isinstance(ask.prompt, list) else [{"role": "user", "content": ask.prompt}]
            return "/v1/chat/completions", {**body, "messages": prompt}
        return "/v1/completions", {**body, "prompt": ask.prompt}


@dataclass(frozen=True)
class Ask:
    """One request: a text, messages or token ids, and the bound on its answer."""

    prompt: Any
    output_len: int


@dataclass
class Outcome:
    """What became of one request. Times in seconds."""

    line: Timeline
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """To the first text."""
        return self.line.first

    @property
    def e2e(self) -> float:
        """To the end of the stream."""
        return self.ended - self.line.submitted

    @property
    def tpot(self) -> float:
        """Mean of each token after the first; 0 for a single one."""
        arrivals = self.line.arrivals
        return (arrivals[-1] - arrivals[0]) / (self.tokens - 1) if self.tokens > 1 and arrivals else 0.0

    def meets(self, objectives: Mapping[str, float]) -> bool:
        """Whether it succeeded within these bounds, in milliseconds."""
        return self.error is None and all(getattr(self, name) * 1e3 <= bound for name, bound in objectives.items())


async def ask_one(client: HttpPool, target: Target, ask: Ask) -> Outcome:
    """One stream to its end. A refusal or a broken connection is an outcome, too."""
    path, body = target.request(ask)
    data = _encode(body)
    outcome = Outcome(Timeline(time.perf_counter()))
    reader = _Reader(outcome)
    try:
        status = await client.post(path, data, reader)
        if status != 200:
            outcome.error = f"{status}: {reader.rest[:200].decode(errors='replace')}"
    except OSError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.ended = time.perf_counter()
    if outcome.error is None and not outcome.line.arrivals:
        outcome.error = "the answer held no text"
    return outcome


class _Reader:
    """Takes the bytes of an answer: notes when text came, and the usage. `rest` is what is no complete line."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.rest = b""

    def __call__(self, status: int, body: bytes) -> None:
        if status != 200:
            self.rest += body
            return
        *lines, self.rest = (self.rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.rstrip().endswith(b"[DONE]"):
                self._note(_decode(line[5:]))

    def _note(self, data: Any) -> None:
        outcome = self._outcome
        if "error" in data:
            outcome.error = str(data["error"])[:200]
            return
        choices = data.get("choices") or ()
        if any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices):
            outcome.line.note(time.perf_counter(), 1)
        usage = data.get("usage")
        if usage:
            outcome.prompt_tokens, outcome.tokens = usage["prompt_tokens"], usage["completion_tokens"]


@dataclass(frozen=True)
class Load:
    """When requests begin: `rate` a second, at random (Poisson); None: at once. At most `concurrency` at a time."""

    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0


async def ask_all(target: Target, asks: Sequence[Ask], load: Load) -> tuple[list[Outcome], float]:
    """All outcomes, in order, and the seconds from the first request to the last answer."""
    limit = asyncio.Semaphore(load.concurrency or len(asks))
    rng = random.Random(load.seed)

    async with target.client() as client:

        async def one(ask: Ask) -> Outcome:
            async with limit:
                return await ask_one(client, target, ask)

        start, due, tasks = time.perf_counter(), 0.0, []
        for ask in asks:
            if load.rate is not None:
                due += rng.expovariate(load.rate)
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(ask)))
        outcomes = await asyncio.gather(*tasks)
        return outcomes, time.perf_counter() - start


def figures(outcomes: Sequence[Outcome], seconds: float, objectives: Mapping[str, float]) -> dict[str, Any]:
    """What the outcomes say, JSON-ready: counts, rates, percentiles in milliseconds, goodput."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    tokens = sum(outcome.tokens for outcome in good)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    pieces = sum(len(outcome.line.arrivals) for outcome in good)
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": tokens,
        "output_tok_per_s": tokens / seconds,
        "total_tok_per_s": (tokens + prompt_tokens) / seconds,
        "tokens_per_piece": tokens / pieces if pieces else None,
        "ttft_ms": _times([outcome.ttft for outcome in good]),
        "tpot_ms": _times([outcome.tpot for outcome in good if outcome.tokens > 1]),
        "itl_ms": _times([gap for outcome in good for gap in outcome.line.gaps]),
        "e2e_ms": _times([outcome.e2e for outcome in good]),
    }
    if objectives:
        found["goodput_per_s"] = sum(outcome.meets(objectives) for outcome in outcomes) / seconds
        found["objectives_ms"] = dict(objectives)
    return found


def _times(values: Sequence[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values) * 1e3 if values else float("nan"), **summary_ms(values)}


def measure(
    target: Target, asks: Sequence[Ask], load: Load, *, objectives: Mapping[str, float], warm_up: int = 1
) -> dict[str, Any]:
    """Ask everything, after `warm_up` requests that do not count. JSON-ready."""

    async def run() -> tuple[list[Outcome], float, float]:
        if warm_up:
            await ask_all(target, asks[:warm_up], Load())
        cpu = time.process_time()
        outcomes, seconds = await ask_all(target, asks, load)
        return outcomes, seconds, time.process_time() - cpu

    outcomes, seconds, cpu = _run(run())
    found = figures(outcomes, seconds, objectives)
    return {**found, "client_cpu_share": cpu / seconds, "rate": load.rate, "concurrency": load.concurrency}


def _run(main: Any) -> Any:
    import uvloop

    return uvloop.run(main)
