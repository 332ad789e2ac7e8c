"""Scripted pipelines behind HTTP: in this process without sockets, or under uvicorn on a free port."""

import contextlib
import json
import logging
import threading

import httpx
import uvicorn

from corogen.adapters.server import ServerSettings, make_app
from corogen.text.chat import ChatTemplate
from tests.adapters.helpers import assert_nothing_runs, make_pipe
from tests.conftest import eventually
from tests.engine.helpers import says, tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

#: the prompt of a chat is its last message
TEMPLATE = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + (
    "{{ messages[-1].content }}"
)


@contextlib.contextmanager
def pipe_with_template(script=None, *, template=TEMPLATE, check=True, **options):
    """A pipeline that repeats the last message of a chat, or follows `script`."""
    with make_pipe(*([script] if script else []), **options) as pipe:
        pipe.engine.admission.template = ChatTemplate(template)
        yield pipe
        if check:
            assert_nothing_runs(pipe)


def answering(text="The capital of France is Paris.", **options):
    """A pipeline that answers everything with this text."""
    return pipe_with_template(says(text, then_eos=True), **options)


def endless(**options):
    """Steps of a millisecond and answers without an end."""
    return pipe_with_template(fake={"step_time_s": 0.001, "max_positions": 20_000}, **options)


@contextlib.asynccontextmanager
async def client(pipe, *, root_path="", **settings):
    """An HTTP client of the application, without sockets."""
    settings.setdefault("served_model_names", ("tiny",))
    transport = httpx.ASGITransport(make_app(pipe, ServerSettings(**settings)), root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        yield http


@contextlib.contextmanager
def served(pipe, **settings):
    """The application under uvicorn on a free port, in a thread. Yields its address."""
    settings.setdefault("served_model_names", ("tiny",))
    app = make_app(pipe, ServerSettings(**settings))
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off", loop="uvloop")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert eventually(lambda: server.started, 20)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def user(text="abcde", **more):
    """Body of a chat with one message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}


def events_of(body):
    """The JSON of every event of a stream, which must end with [DONE]."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(events, index=0):
    """The text of one choice of a streamed answer."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def finishes(events, index=0):
    """Every finish reason that one choice of a streamed answer has."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def error_of(reply):
    """The error of a reply, which must be OpenAI's envelope."""
    body = reply.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    return body["error"]


@contextlib.contextmanager
def logged(level=logging.DEBUG):
    """What is logged under "corogen", as it would stand in a file."""
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(self.format(record))

    logger, handler = logging.getLogger("corogen"), Keep()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def encode(text):
    """Token ids of a raw text."""
    return tokenizer().encode(text, add_special_tokens=True)
