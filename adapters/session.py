"""Chats: a history of messages on the caller's side. The prefix cache makes sending it again cheap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from corogen.adapters.streams import Stream
from corogen.errors import InvalidRequest
from corogen.outputs import Response
from corogen.params import GenerationConfig


class Session:
    """One conversation. `Pipeline.chat` answers in it; only a complete answer becomes part of its history.

    Args:
        messages: what comes before the first question: a system message, an earlier history.
        gen_config: for questions that bring none.

    Raises:
        InvalidRequest: `messages` is no list of messages.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]] = (), gen_config: GenerationConfig | None = None) -> None:
        self.gen_config = gen_config
        #: the last complete answer
        self.response: Response | None = None
        #: the messages so far; may be read and changed between questions
        self.history: list[dict[str, Any]] = _history(messages)
        self._busy = threading.Lock()
        self._abort: Callable[[], None] | None = None

    def ask(self, prompt: Any) -> list[dict[str, Any]]:
        """The messages that put `prompt` (a text, a message or a list of messages) into this conversation.

        The session is busy from here until `done`.

        Raises:
            InvalidRequest: another question is being answered, or `prompt` is no message.
        """
        new = _messages(prompt)
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest(
                "this session is answering another question: wait for it, or make a session for each conversation",
                param="session",
            )
        try:
            return [*_history(self.history), *new]
        except BaseException:  # somebody has put something else there
            self._busy.release()
            raise

    def done(self, messages: list[dict[str, Any]], answer: Response | None) -> None:
        """The question was answered (or not: None); a complete answer enters the history."""
        if answer is not None and answer.finish_reason in ("stop", "length"):
            self.history = [*messages, {"role": "assistant", "content": answer.text}]
            self.response = answer
        self._abort = None
        self._busy.release()

    def abort_with(self, abort: Callable[[], None]) -> None:
        """What `abort` does from now on, until `done`."""
        self._abort = abort

    def abort(self) -> None:
        """End the answer that is being generated, if there is one. From any thread."""
        abort = self._abort
        if abort is not None:
            abort()

    def reset(self) -> None:
        """Forget everything."""
        self.history = []


class ChatStream:
    """The pieces of an answer in a session; an iterator and context manager. Read to its end, it enters the history."""

    def __init__(self, session: Session, messages: list[dict[str, Any]], stream: Stream) -> None:
        self._session, self._messages, self._stream = session, messages, stream
        self._answer, self._over = Response(), False

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> Response:
        """The next piece. Raises what `Stream` raises."""
        try:
            piece = next(self._stream)
        except StopIteration:
            self._finish(self._answer)
            raise
        except BaseException:
            self._finish(None)
            raise
        self._answer.extend(piece)
        if piece.finish_reason is not None:
            self._finish(self._answer)
        return piece

    def close(self) -> None:
        """Abort the answer if it still runs; the history stays what it was."""
        self._stream.close()
        self._finish(None)

    def _finish(self, answer: Response | None) -> None:
        if not self._over:
            self._over = True
            self._session.done(self._messages, answer)

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_over"):
            self.close()


def _history(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, list | tuple) and all(isinstance(message, Mapping) for message in messages):
        return [dict(message) for message in messages]
    raise InvalidRequest(
        'a session begins with a list of messages, such as [{"role": "system", "content": "Be brief."}], '
        f"not {messages!r}",
        param="messages",
    )


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    items = [prompt] if isinstance(prompt, Mapping) else prompt
    if isinstance(items, list | tuple) and items and all(isinstance(item, Mapping) for item in items):
        return [dict(item) for item in items]
    raise InvalidRequest(
        f"in a chat the prompt is a text, a message or a list of messages, not {prompt!r}", param="prompt"
    )
