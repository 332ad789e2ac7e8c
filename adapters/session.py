"""Conversations: the history lives with the caller, and every turn sends it whole."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from corogen.adapters.calls import SyncStream
from corogen.errors import InvalidRequest
from corogen.outputs import Response
from corogen.params import GenerationConfig


class Session:
    """One conversation. A turn that fails, or is aborted, leaves `messages` as they were."""

    def __init__(self, gen_config: GenerationConfig | None = None) -> None:
        #: the conversation so far, as a chat
        self.messages: list[dict[str, Any]] = []
        self.gen_config = gen_config
        #: the last answer
        self.response: Response | None = None
        self.stream: SyncStream | None = None
        self._busy = threading.Lock()

    @property
    def history(self) -> list[tuple[str, str]]:
        """Pairs of what the user said and what was answered."""
        said = [m["content"] for m in self.messages if m["role"] == "user"]
        answered = [m["content"] for m in self.messages if m["role"] == "assistant"]
        return list(zip(said, answered, strict=False))

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages, self.response = [], None

    def begin(self, prompt: str) -> list[dict[str, Any]]:
        """The chat to send for the next turn. A second turn at the same time is refused with InvalidRequest."""
        if not isinstance(prompt, str):
            raise InvalidRequest(f"a turn of a conversation is a string, not {type(prompt).__name__}", param="prompt")
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest("the session is answering already: wait for it, or use a second session")
        return [*self.messages, {"role": "user", "content": prompt}]

    def finish(self, messages: list[dict[str, Any]], answer: Response | None) -> None:
        """End the turn; only a complete answer becomes part of the conversation."""
        if answer is not None and answer.finish_reason in ("stop", "length"):
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            self.response = answer
        self.stream = None
        self._busy.release()

    def __repr__(self) -> str:
        return self.response.text if self.response is not None else "Session()"


class SessionStream:
    """Pieces of one turn; the conversation grows when the last piece has been read."""

    def __init__(self, session: Session, messages: list[dict[str, Any]], stream: SyncStream) -> None:
        self._session, self._messages, self._stream = session, messages, stream
        self._answer = Response()
        self._finished = False

    def __iter__(self) -> SessionStream:
        return self

    def __next__(self) -> Response:
        try:
            piece = next(self._stream)
        except BaseException:
            self.close()
            raise
        self._answer.extend(piece)
        return piece

    def close(self) -> None:
        """End the turn: abort it if it still runs, keep it if it is complete."""
        if not self._finished:
            self._finished = True
            self._stream.close()
            self._session.finish(self._messages, self._answer)

    def __enter__(self) -> SessionStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
