"""What is asked in a measurement, and reading every answer with a consumer of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corogen.adapters.bench.figures import Timeline
from corogen.errors import InvalidRequest, RequestFailed
from corogen.params import GenerationConfig

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

#: ids below this are special or single bytes in many tokenizers
_FIRST_PLAIN_ID = 300


#: the prompts of one round, by its number; no two rounds ask the same, so that no answer's prompt is cached as a whole
PromptSource = Callable[[int], list[Any]]


def story_prompts(count: int, round_number: int = 0) -> list[Any]:
    """`count` different chats of about 47 tokens; they begin alike, with the chat template's system message."""
    text = "Tell me a short story about animal number {} and explain why it likes the colour blue."
    return [
        [{"role": "user", "content": text.format(i)}] for i in range(count * round_number, count * (round_number + 1))
    ]


def random_prompts(count: int, length: int, vocab_size: int, *, seed: int = 0) -> list[Any]:
    """`count` prompts of exactly `length` token ids, without a common beginning."""
    rng = random.Random(seed)
    low = min(_FIRST_PLAIN_ID, vocab_size // 2)
    return [[rng.randrange(low, vocab_size) for _ in range(length)] for _ in range(count)]


def varied_prompts(count: int, low: int, high: int, vocab_size: int, *, seed: int = 0) -> list[Any]:
    """`count` prompts of `low` to `high` random token ids, without a common beginning."""
    rng = random.Random(seed)
    return [random_prompts(1, rng.randint(low, high), vocab_size, seed=rng.getrandbits(60))[0] for _ in range(count)]


def prompts_from(path: Path, count: int, round_number: int = 0) -> list[Any]:
    """The next `count` prompts of a file, again from its beginning when it has fewer.

    A line is a JSON string, a JSON list (messages or token ids), a JSON object with "messages" or "prompt", or plain
    text.

    Raises:
        InvalidRequest: the file can not be read, or is empty.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the prompts can not be read from {path}: {error}", param="prompts") from error
    if not lines:
        raise InvalidRequest(f"{path} holds no prompt: write one a line", param="prompts")
    first = count * round_number
    return list(itertools.islice(itertools.cycle(map(_prompt_of, lines)), first, first + count))


def _prompt_of(line: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError:
        value = line
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt", line))
    if isinstance(value, list):
        return value
    return [{"role": "user", "content": value if isinstance(value, str) else line}]


@dataclass
class Round:
    """All answers of one go."""

    seconds: float
    lines: list[Timeline]
    ids: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Generated tokens of all answers."""
        return sum(line.total for line in self.lines)

    @property
    def rate(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.tokens / self.seconds


async def stream_all(pipe: Pipeline, prompts: Sequence[Any], gen_config: GenerationConfig) -> Round:
    """Submit all prompts at once; one consumer reads each stream.

    Raises:
        CorogenError: of the first request that failed.
    """
    start = time.perf_counter()
    answers = await asyncio.gather(*(read_stream(pipe, prompt, gen_config) for prompt in prompts))
    seconds = time.perf_counter() - start
    return Round(seconds, [line for line, _ in answers], [ids for _, ids in answers])


async def read_stream(pipe: Pipeline, prompt: Any, gen_config: GenerationConfig) -> tuple[Timeline, list[int]]:
    """One stream to its end: when its pieces came, and its token ids."""
    line, ids = Timeline(time.perf_counter()), []
    async for piece in pipe.async_stream_infer(prompt, gen_config=gen_config):
        if piece.error_code is not None:
            raise RequestFailed(f"a request of the benchmark failed: {piece.error_code}: {piece.error_message}")
        line.note(time.perf_counter(), len(piece.token_ids))
        ids += piece.token_ids
    return line, ids
