"""What a step costs the engine's thread: scripted tokens in scripted time, and a consumer for each stream.

No model computes here. Every step answers all streams after a fixed time, as a device would, and consumers on another
loop in another thread read every piece. What is measured is the engine: planning, detokenising, hand-over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from corogen.config import EngineConfig
from corogen.params import GenerationConfig
from corogen.testing import FakeExecutor
from corogen.wire.messages import StepInput

_TEXT = "The capital of France is Paris, as everybody knows who has ever been there. 你好, café! "
_PROMPT_LEN = 16


class Mark(NamedTuple):
    """One step, as the engine's thread saw it."""

    rows: int
    #: `time.perf_counter()` when its result was due
    at: float
    #: CPU seconds of the engine's thread until then
    cpu: float
    #: CPU seconds that the pretended device took of them
    own: float


class MeteredExecutor(FakeExecutor):
    """A scripted executor that notes what the engine's thread has used at every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.marks: list[Mark] = []

    def compute(self, step: StepInput) -> list[int]:
        """The ids of one step, and a mark."""
        before = time.thread_time()
        tokens = super().compute(step)
        rows = len(step.decode) if not step.prefill else 0
        self.marks.append(Mark(rows, time.perf_counter(), before, time.thread_time() - before))
        return tokens


@dataclass(frozen=True)
class StepCost:
    """The result. Times in milliseconds."""

    streams: int
    step_time_ms: float
    #: full steps in the measured window: those in which every stream got a token
    steps: int
    #: engine-thread CPU time a step, the scripted device's own share excluded
    engine_ms_per_step: float
    #: the scripted device's share
    device_ms_per_step: float
    #: scripted step time over the real one
    rate_share: float
    #: pieces that consumers received, by token
    tokens_per_piece: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"benchmark": "steps", **asdict(self)}


def step_cost(marks: Sequence[Mark], streams: int, step_time_s: float, tokens_per_piece: float) -> StepCost:
    """Reduce the marks of full steps to a cost.

    Raises:
        ValueError: fewer than two full steps.
    """
    full = [mark for mark in marks if mark.rows == streams]
    if len(full) < 2:
        raise ValueError("no two full steps were seen: ask for more tokens")
    count, first, last = len(full) - 1, full[0], full[-1]
    own = sum(mark.own for mark in full[:-1])
    return StepCost(
        streams=streams,
        step_time_ms=step_time_s * 1e3,
        steps=count,
        engine_ms_per_step=(last.cpu - first.cpu - own) / count * 1e3,
        device_ms_per_step=own / count * 1e3,
        rate_share=step_time_s * count / (last.at - first.at),
        tokens_per_piece=tokens_per_piece,
    )
