"""A running server in the place of a pipeline, for `corogen chat --url`."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

import httpx

from corogen.adapters.session import ChatStream, Session
from corogen.errors import EngineClosed, InvalidRequest, RequestFailed
from corogen.outputs import Response
from corogen.params import GenerationConfig

#: settings and their names over HTTP
_NAMES = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "random_seed": "seed",
    "stop_words": "stop",
}


class RemotePipeline:
    """What `chat` needs of a pipeline, answered by a server with OpenAI's API.

    Raises:
        EngineClosed: the server can not be reached, or fails.
        InvalidRequest: it refuses.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=httpx.Timeout(30, read=None))
        self._model = self._first_model() if model is None else model

    def _first_model(self) -> str:
        try:
            reply = self._http.get("/v1/models")
            raise_for(reply)
            return str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            self._http.close()
            raise EngineClosed(f"{self._url} can not be asked for its models: {error}") from error

    session = staticmethod(Session)

    def chat(
        self, prompt: Any, session: Session, gen_config: GenerationConfig, stream_response: bool = True
    ) -> ChatStream:
        """The pieces of an answer in a conversation, as `Pipeline.chat` gives them."""
        messages = session.ask(prompt)
        given = gen_config.explicit()
        body = {_NAMES[name]: value for name, value in given.items() if name in _NAMES and value is not None}
        if not given.get("do_sample"):
            body["temperature"] = 0.0
        body |= {"model": self._model, "messages": messages, "stream": True}
        stream = RemoteStream(self._http, body)
        session.abort_with(stream.close)
        return ChatStream(session, messages, stream)  # type: ignore[arg-type]

    def __enter__(self) -> RemotePipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()


class RemoteStream:
    """An iterator over the pieces of one streamed answer. Closing it aborts the request."""

    def __init__(self, http: httpx.Client, body: dict[str, Any]) -> None:
        self._pieces = _pieces(http, body)

    def __iter__(self) -> RemoteStream:
        return self

    def __next__(self) -> Response:
        """The next piece. Raises EngineClosed, InvalidRequest, RequestFailed."""
        return next(self._pieces)

    def close(self) -> None:
        """Leave."""
        self._pieces.close()


def _pieces(http: httpx.Client, body: dict[str, Any]) -> Generator[Response, None, None]:
    """A generator, which only `RemoteStream` holds, so that its end is the connection's."""
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
            raise_for(reply)
            yield from _read(reply)
    except httpx.HTTPError as error:
        raise EngineClosed(f"the connection to the server failed: {error}") from error


def _read(reply: httpx.Response) -> Iterator[Response]:
    for line in reply.iter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        data = json.loads(line[5:])
        if "error" in data:
            raise RequestFailed(str(data["error"].get("message")))
        for choice in data.get("choices", ()):
            yield Response(choice["delta"].get("content") or "", finish_reason=choice.get("finish_reason"))


def raise_for(reply: httpx.Response) -> None:
    """Raise what a refusal means: InvalidRequest for 4xx, EngineClosed for 5xx; with the server's own words."""
    if reply.is_success:
        return
    try:
        words = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        words = reply.text[:200] or reply.reason_phrase
    kind = InvalidRequest if reply.is_client_error else EngineClosed
    raise kind(f"the server says {reply.status_code}: {words}")
