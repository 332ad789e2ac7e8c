"""What `launch_engine` costs by itself: a model that adds one, through every layout of workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from corogen.adapters.bench.figures import summary_ms
from corogen.adapters.bench.machine import cpu_seconds
from corogen.adapters.tasks import AsyncEngine, launch_engine

LAYOUTS = ((1, 1),)
#: of the input, as EnergonAI was measured with: float32
SHAPE = (8, 512)
_WARM_UP = 50


def null_model() -> Any:
    """Adds one; as many stages as there are."""
    return lambda x: x + 1


def measure(
    layouts: Sequence[tuple[int, int]] = LAYOUTS,
    *,
    requests: int = 1000,
    batches: int = 5000,
    idle_s: float = 5.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """One request after the other, then many batches at once, then nothing, for each (tp, pp). JSON-ready."""
    rows = []
    for tp, pp in layouts:
        rows.append(_layout(tp, pp, requests, batches, idle_s))
        say(f"tp {tp}, pp {pp}: p50 {rows[-1]['wait_ms']['p50']:.2f} ms, {rows[-1]['batches_per_s']:.0f} batches/s")
    return {"requests": requests, "batches": batches, "shape": list(SHAPE), "idle_s": idle_s, "layouts": rows}


def _layout(tp: int, pp: int, requests: int, batches: int, idle_s: float) -> dict[str, Any]:
    import torch

    x = torch.zeros(SHAPE)
    with launch_engine(tp=tp, pp=pp, model_fn=null_model, device_type="cpu", num_threads=1) as engine:
        asyncio.run(_waits(engine, x, _WARM_UP))
        waits = asyncio.run(_waits(engine, x, requests))
        gets = _gets(engine, x, requests)
        rate = asyncio.run(_rate(engine, x, batches))
        return {
            "tp": tp,
            "pp": pp,
            "wait_ms": summary_ms(waits),
            "get_ms": summary_ms(gets),
            "batches_per_s": rate,
            "idle_cpu": _idle(engine, idle_s),
        }


async def _waits(engine: AsyncEngine, x: Any, count: int) -> list[float]:
    """Seconds from `submit` to the end of `wait`, one after the other."""
    seconds = []
    for uid in range(count):
        began = time.perf_counter()
        engine.submit(uid, x)
        await engine.wait(uid)
        seconds.append(time.perf_counter() - began)
    return seconds


def _gets(engine: AsyncEngine, x: Any, count: int) -> list[float]:
    seconds = []
    for uid in range(count):
        began = time.perf_counter()
        engine.submit(uid, x)
        engine.get(uid)
        seconds.append(time.perf_counter() - began)
    return seconds


async def _rate(engine: AsyncEngine, x: Any, count: int) -> float:
    """Batches a second when all are submitted at once; one task is one batch."""
    began = time.perf_counter()
    for handle in [engine.submit(uid, x) for uid in range(count)]:
        await handle
    return count / (time.perf_counter() - began)


def _idle(engine: AsyncEngine, seconds: float) -> list[float]:
    """The share of a core that each process uses while there is nothing to do: this one first, then the workers."""
    pids = [None, *engine.pids]
    before = [cpu_seconds(pid) or 0.0 for pid in pids]
    time.sleep(seconds)
    used = [(cpu_seconds(pid) or 0.0) - start for pid, start in zip(pids, before, strict=True)]
    return [share / seconds if seconds else 0.0 for share in used]
