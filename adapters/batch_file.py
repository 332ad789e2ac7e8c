"""OpenAI's batch format: requests in one file, answers in another. Bounded memory; goes on where it stopped."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx

from corogen.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: answers to these are asked for anew when the file is resumed
_PASSING = frozenset({408, 429, 500, 502, 503, 504})

#: what a line may ask for
URLS = ("/v1/chat/completions", "/v1/completions")


def take_answered(path: Path) -> set[str]:
    """The `custom_id`s that an earlier run has answered for good; the rest of the file is dropped from it.

    Raises:
        ConfigError: the file is not one of answers.
    """
    path = path.resolve()  # a link stays one
    if not path.exists():
        return set()
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file: answers are read again when a batch goes on, so they need one")
    found, dropped, kept = set(), False, path.with_name(path.name + ".kept")
    try:
        with path.open("rb") as old, kept.open("wb") as new:
            for line in old:
                custom_id = _answered_id(path, line)
                if custom_id is None or custom_id in found:
                    dropped = True
                else:
                    found.add(custom_id)
                    new.write(line)
        if dropped:
            shutil.copymode(path, kept)
            kept.replace(path)
    finally:
        kept.unlink(missing_ok=True)
    return found


def _answered_id(path: Path, line: bytes) -> str | None:
    if not line.endswith(b"\n"):  # the run was stopped in the middle of it
        return None
    try:
        answer = json.loads(line)
        custom_id, response = str(answer["custom_id"]), answer["response"]
        status = None if response is None else int(response["status_code"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no file of answers: give a new name, or remove it") from error
    return None if status is None or status in _PASSING else custom_id


def requests_in(path: Path, answered: set[str]) -> Iterator[dict[str, Any]]:
    """The lines of a file that have no answer yet, one at a time.

    Raises:
        ConfigError: the file can not be read; or naming the line that is no request, or repeats an id.
    """
    seen: set[str] = set()
    try:
        file = path.open(encoding="utf-8-sig", errors="surrogateescape")  # what is no text fails in its own line
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error}") from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            request = _request(path, number, line)
            custom_id = request["custom_id"]
            if custom_id in seen:
                raise ConfigError(f"{path}:{number} has the custom_id of an earlier line: {custom_id!r}")
            seen.add(custom_id)
            if custom_id not in answered:
                yield request


def _request(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number} is no JSON: {error}") from error
    if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
        raise ConfigError(f'{path}:{number} is no request: it needs a "custom_id", "url" and "body"')
    if request.get("url") not in URLS or request.get("method", "POST") != "POST":
        raise ConfigError(f"{path}:{number} asks for {request.get('url')!r}; there are POST {' and '.join(URLS)}")
    if not isinstance(request.get("body"), dict):
        raise ConfigError(f"{path}:{number} has no body")
    if request["body"].get("stream"):
        raise ConfigError(f"{path}:{number} asks for a stream, which a file can not hold")
    return request


async def answer_file(
    app: ASGIApp, source: Path, target: Path, *, at_once: int, on_answer: Callable[[bool], None]
) -> tuple[int, int]:
    """Answer every request of `source` that `target` does not answer yet, at most `at_once` at a time.

    Look through `requests_in(source, set())` first, so that a bad line is found before anything is answered.

    Answers are appended as they come. `on_answer(succeeded)` hears of each, those of earlier runs included.

    Returns:
        How many succeeded and how many failed in this run.

    Raises:
        ConfigError: naming the line at fault. What was answered before stays.
    """
    answered = take_answered(target)
    for _ in answered:
        on_answer(True)
    counts = [0, 0]
    pending = iter(requests_in(source, answered))
    transport = httpx.ASGITransport(app)
    with target.open("a", encoding="ascii") as out:
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as http:

            async def work() -> None:
                for request in pending:  # shared: each worker takes the next
                    succeeded = await _answer(http, request, out)
                    counts[not succeeded] += 1
                    on_answer(succeeded)

            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(work())
    return counts[0], counts[1]


async def _answer(http: httpx.AsyncClient, request: dict[str, Any], out: IO[str]) -> bool:
    # as it came, odd numbers and characters included: what is wrong with it is the server's to say
    body = json.dumps(request["body"]).encode()
    reply = await http.post(request["url"], content=body, headers={"content-type": "application/json"})
    request_id = reply.headers["x-request-id"]
    response = {"status_code": reply.status_code, "request_id": request_id, "body": reply.json()}
    line = {"id": f"batch_req_{request_id}", "custom_id": request["custom_id"], "response": response, "error": None}
    out.write(json.dumps(line) + "\n")
    out.flush()
    return reply.is_success
