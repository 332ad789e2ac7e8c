"""`corogen serve` as a process: start, signals, end; and its options."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from corogen.adapters.cli import serve as serve_module
from corogen.adapters.server.lifecycle import take_port
from corogen.errors import ConfigError
from tests.adapters.cli_helpers import corogen
from tests.adapters.scripted_main import said
from tests.server.helpers import CHAT, events_of, joined

ROOT = Path(__file__).resolve().parents[2]
SERVE = [sys.executable, "-m", "tests.server.serve_main", "serve", "demo", "--port", "0"]


@contextlib.contextmanager
def process(*options, **environment):
    """The server as a process. Yields it and its address."""
    server = subprocess.Popen(
        [*SERVE, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in server.stderr:
            if found := re.search(r"serving \S+ on (\S+)", line):
                break
        else:
            raise AssertionError("it did not start")
        yield server, found[1]
    finally:
        server.kill()
        server.communicate()


def question(text="hello", **more):
    return {"messages": [{"role": "user", "content": text}], **more}


class TestProcess:
    def test_the_first_chat_after_the_greeting_is_answered_and_sigterm_ends_it(self):
        with process() as (server, url):
            reply = httpx.post(url + CHAT, json=question())
            assert reply.json()["choices"][0]["message"]["content"] == said("hello")
            assert reply.json()["model"] == "demo"
            server.send_signal(signal.SIGTERM)
            out, err = server.communicate(timeout=20)
        assert (server.returncode, out) == (0, "")
        assert err.splitlines()[-1] == "closed"
        assert "Traceback" not in err

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_lets_a_running_stream_finish_and_takes_nothing_new(self, number):
        text = "a long one " * 40

        async def main(server, url):
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                async with http.stream("POST", CHAT, json=question(text, stream=True)) as reply:
                    pieces = reply.aiter_text()
                    seen = await anext(pieces)
                    server.send_signal(number)
                    async for piece in pieces:
                        seen += piece
                return seen

        with process() as (server, url):
            seen = asyncio.run(main(server, url))
            assert joined(events_of(seen)) == said(text)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            server.communicate(timeout=20)
        assert server.returncode == 0

    def test_a_second_signal_ends_what_runs(self):
        async def main(server, url):
            async with (
                httpx.AsyncClient(base_url=url, timeout=30) as http,
                http.stream("POST", CHAT, json=question("word " * 600, stream=True)) as reply,
            ):
                pieces = reply.aiter_text()
                await anext(pieces)
                server.send_signal(signal.SIGINT)
                assert "closing" in await asyncio.to_thread(server.stderr.readline)
                server.send_signal(signal.SIGINT)
                with contextlib.suppress(httpx.RemoteProtocolError):
                    return [piece async for piece in pieces]

        with process() as (server, url):
            asyncio.run(main(server, url))
            server.communicate(timeout=20)
        assert server.returncode == 0

    def test_what_does_not_finish_in_time_gets_an_error(self):
        async def main(server, url):
            async with (
                httpx.AsyncClient(base_url=url, timeout=30) as http,
                http.stream("POST", CHAT, json=question("word " * 600, stream=True)) as reply,
            ):
                pieces = reply.aiter_text()
                seen = await anext(pieces)
                server.send_signal(signal.SIGTERM)
                async for piece in pieces:
                    seen += piece
                return seen

        with process("--shutdown-timeout", "0.05") as (server, url):
            events = events_of(asyncio.run(main(server, url)))
            server.communicate(timeout=20)
        assert events[-1]["error"]["code"] == "engine_closed"
        assert server.returncode == 0

    def test_keys_names_and_json_logs(self):
        options = ("--served-model-name", "mine", "--log-json", "--log-level", "info")
        with process(*options, COROGEN_API_KEYS="one,two") as (server, url):
            assert httpx.post(url + CHAT, json=question()).status_code == 401
            headers = {"authorization": "Bearer two", "x-request-id": "seven"}
            assert httpx.post(url + CHAT, json=question(), headers=headers).json()["model"] == "mine"
            server.send_signal(signal.SIGTERM)
            _, err = server.communicate(timeout=20)
        assert '"request_id": "seven"' in err


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--port", "70000"], "65535"),
            (["--overload-status", "200"], "200"),
            (["--ssl-certfile", "x"], "both"),
            (["--ssl-certfile", "/nowhere/x", "--ssl-keyfile", "/nowhere/y"], "/nowhere/x"),
            (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
            (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        ],
    )
    def test_what_can_not_be_is_said_before_a_model_is_loaded(self, monkeypatch, options, words):
        monkeypatch.setattr(serve_module, "open_pipeline", lambda *a, **k: pytest.fail("loaded"))
        done = corogen("serve", *options)
        assert done.exit_code in (1, 2)
        assert words in done.stderr

    def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(self, monkeypatch):
        monkeypatch.setattr(serve_module, "open_pipeline", lambda *a, **k: pytest.fail("loaded"))
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            done = corogen("serve", "--port", other.getsockname()[1])
        assert done.exit_code == 1
        assert "choose another port" in done.stderr

    def test_nobody_can_connect_while_the_model_is_loaded(self):
        with take_port("127.0.0.1", 0) as sock, pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{sock.getsockname()[1]}/health")

    def test_a_bad_address_is_a_config_error(self):
        with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
            take_port("203.0.113.7", 0)

    def test_a_model_that_can_not_be_loaded_ends_the_process_with_an_error(self):
        done = corogen("serve", "/nowhere/model", "--port", "0")
        assert done.exit_code == 1
        assert "/nowhere/model" in done.stderr
