"""What a step costs the engine's thread: scripted tokens in scripted time, and a consumer for each stream.

No model computes here. Every step answers all streams after a fixed time, as a device would, and consumers on another
loop in another thread read every piece. What is measured is the engine: planning, detokenising, hand-over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from corogen.adapters.bench.workload import stream_all
from corogen.config import EngineConfig
from corogen.errors import ConfigError
from corogen.params import GenerationConfig
from corogen.testing import FakeExecutor
from corogen.wire.messages import StepInput

if TYPE_CHECKING:
    from corogen.adapters.bench.workload import Round
    from corogen.text.tokenizer import Tokenizer

_TEXT = "The capital of France is Paris, as everybody knows who has ever been there. 你好, café! "
_PROMPT_LEN = 16
_BLOCK_SIZE = 16


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
    #: CPU time that all consumers together took of their own thread, a step
    consumer_ms_per_step: float
    tokens_per_piece: float
    tokenizer: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def measure(
    *,
    streams: int = 256,
    step_time_s: float = 0.004,
    new_tokens: int = 500,
    tokenizer_folder: Path | None = None,
) -> StepCost:
    """Run `streams` scripted answers of `new_tokens` tokens through a pipeline and its engine thread.

    The consumers live on an asyncio loop in the calling thread, one coroutine a stream.

    Args:
        tokenizer_folder: a model folder whose tokenizer decodes; None: a small byte-level one, one token a byte.

    Raises:
        ConfigError: too few tokens for two full steps.
    """
    tokenizer, ids = _answer(tokenizer_folder)
    blocks = streams * (-(-(new_tokens + _PROMPT_LEN) // _BLOCK_SIZE) + 1)
    executor = MeteredExecutor(
        lambda prompt: ids,
        step_time_s=step_time_s,
        num_blocks=blocks,
        max_positions=new_tokens + _PROMPT_LEN + 1,
        vocab_size=tokenizer.vocab_size,
    )
    config = EngineConfig(block_size=_BLOCK_SIZE, max_batch_size=streams, max_prefill_token_num=max(8192, streams))
    run, cpu = _consume(executor, tokenizer, config, streams, new_tokens)
    pieces = sum(len(line.arrivals) for line in run.lines)
    return step_cost(
        executor.marks,
        streams=streams,
        step_time_s=step_time_s,
        consumer_ms_per_step=cpu / new_tokens * 1e3,
        tokens_per_piece=run.tokens / pieces,
        tokenizer=str(tokenizer_folder or "byte-level, one token a byte"),
    )


def _answer(folder: Path | None) -> tuple[Tokenizer, list[int]]:
    from corogen.testing.tokenizers import byte_level_tokenizer
    from corogen.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(byte_level_tokenizer(words=())) if folder is None else Tokenizer.from_folder(folder)
    return tokenizer, tokenizer.encode(_TEXT * 50, add_special_tokens=False)


def _consume(
    executor: MeteredExecutor, tokenizer: Tokenizer, config: EngineConfig, streams: int, new_tokens: int
) -> tuple[Round, float]:
    """All streams to their end; with the CPU seconds that this thread used for it."""
    from corogen.adapters.pipeline import Pipeline

    prompts = [[3 + i % 200] * _PROMPT_LEN for i in range(streams)]
    gen_config = GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True)
    with Pipeline(backend_config=config, executor=executor, tokenizer=tokenizer) as pipe:
        before = time.thread_time()
        run = asyncio.run(stream_all(pipe, prompts, gen_config))
        return run, time.thread_time() - before


def step_cost(marks: Sequence[Mark], *, streams: int, step_time_s: float, **more: Any) -> StepCost:
    """Reduce the marks of full steps to a cost; `more` are the remaining fields of StepCost.

    Raises:
        ConfigError: fewer than two full steps.
    """
    full = [mark for mark in marks if mark.rows == streams]
    if len(full) < 2:
        raise ConfigError("no two steps were seen in which every stream got a token: raise the output length")
    count, first, last = len(full) - 1, full[0], full[-1]
    own = sum(mark.own for mark in full[:-1])
    return StepCost(
        streams=streams,
        step_time_ms=step_time_s * 1e3,
        steps=count,
        engine_ms_per_step=(last.cpu - first.cpu - own) / count * 1e3,
        device_ms_per_step=own / count * 1e3,
        rate_share=step_time_s * count / (last.at - first.at),
        **more,
    )
