"""What a server is asked: random token ids, chats of our own, or conversations from a file like ShareGPT's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from corogen.adapters.bench.serve import Ask
from corogen.adapters.bench.workload import prompts_from, story_prompts
from corogen.errors import InvalidRequest

#: characters of one token, roughly, where a text's length stands for its tokens
_CHARACTERS = 4

#: conversations outside these lengths, in tokens, are left out, as is usual with ShareGPT
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


def story_asks(count: int, output_len: int) -> list[Ask]:
    """Chats of about 47 tokens."""
    return [Ask(prompt, output_len) for prompt in story_prompts(count)]


def random_asks(count: int, input_len: int, output_len: int, *, spread: float, vocab_size: int, seed: int) -> list[Ask]:
    """Random token ids; lengths between `1 - spread` and 1 times those given, for both sides."""
    rng = random.Random(seed)

    def length(most: int) -> int:
        return rng.randint(max(1, round(most * (1 - spread))), most)

    low = min(300, vocab_size // 2)
    return [
        Ask([rng.randrange(low, vocab_size) for _ in range(length(input_len))], length(output_len))
        for _ in range(count)
    ]


def asks_from(path: Path, count: int, output_len: int, *, seed: int) -> list[Ask]:
    """Requests from a file: ShareGPT's JSON list of conversations, or one prompt a line as for `bench throughput`.

    Of a conversation the first message is the prompt, and the length of the second bounds the answer.

    Raises:
        InvalidRequest: the file can not be read, or holds nothing usable.
    """
    if path.suffix != ".json":
        return [Ask(prompt, output_len) for prompt in prompts_from(path, count)]
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
        found = [ask for ask in map(_first_turns, conversations) if ask is not None]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"the conversations can not be read from {path}: {error!r}", param="prompts") from error
    if not found:
        raise InvalidRequest(f"{path} holds no conversation of a usable length", param="prompts")
    random.Random(seed).shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def _first_turns(conversation: dict[str, Any]) -> Ask | None:
    turns = conversation.get("conversations") or conversation.get("conversation") or []
    if len(turns) < 2:
        return None
    prompt, answer = (str(turn.get("value", turn.get("content", ""))) for turn in turns[:2])
    asked, answered = len(prompt) // _CHARACTERS, len(answer) // _CHARACTERS
    if asked < _SHORTEST or answered < _SHORTEST or asked > _LONGEST_PROMPT or asked + answered > _LONGEST:
        return None
    return Ask([{"role": "user", "content": prompt}], answered)
