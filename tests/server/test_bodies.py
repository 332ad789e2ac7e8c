"""Bodies: parsed in bounded time beside the loop; too large, too slow, or on their way when the server ends."""

import asyncio
import contextlib
import json
import signal
import threading
import time

import pytest

from corogen.adapters.server import bodies
from corogen.adapters.server.errors import ApiError
from corogen.adapters.server.parsing import MAX_NODES, parse
from corogen.adapters.server.schema import ChatRequest, CompletionRequest
from tests.server.helpers import CHAT, TEXT, client, error_of, pipe_with_template, served, user
from tests.server.test_lifecycle import process

JSON = {"content-type": "application/json"}


@pytest.fixture
def pipe():
    with pipe_with_template() as pipe:
        yield pipe


class TestParse:
    @pytest.mark.parametrize("value", [{}, [1, 2.5, None, True], {"a": {"b": "\u00fc\ud800"}}, 2**70, "x"])
    def test_what_json_knows_is_read(self, value):
        assert parse(json.dumps(value).encode()) == value

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
    def test_other_encodings_are_read(self, encoding):
        assert parse('{"a": "ü"}'.encode(encoding)) == {"a": "ü"}

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"{", "property name"),
            (b"", "value"),
            (b'"\xff"', "byte 1 is no utf-8"),
            (b"[" * 200_000, "within each other"),
            (b"9" * 5000, "digits"),
            (b'{"a": SECRET}', "at character 6"),
        ],
    )
    def test_what_is_no_json_is_said_without_quoting_it(self, data, words):
        with pytest.raises(ApiError, match=words) as caught:
            parse(data)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")
        assert "SECRET" not in caught.value.message

    @pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":0}', b'"",[]'])
    def test_more_nodes_than_any_request_needs_are_refused_before_they_are_made(self, item):
        begun = time.process_time()
        with pytest.raises(ApiError, match="lists, objects and fields"):
            parse(b"[" + b",".join([item] * (4 * MAX_NODES)) + b"]")
        assert time.process_time() - begun < 5

    @pytest.mark.parametrize("text", ["[" * 2 * MAX_NODES, '\\"[{' * MAX_NODES, "\\\\"])
    def test_brackets_in_texts_are_no_nodes(self, text):
        data = json.dumps({"a": text, "b": text}).encode()
        assert parse(data) == {"a": text, "b": text}

    def test_one_bad_item_of_millions_is_one_error(self):
        data = json.dumps({"prompt": [*range(100_000), "x"]}).encode()
        with pytest.raises(ApiError, match=r"prompt: .* string") as caught:
            bodies.read_body(data, CompletionRequest)
        assert caught.value.param == "prompt"


class TestLarge:
    @pytest.mark.parametrize("words", [100, 40_000])
    async def test_is_read_in_a_thread_and_answered_like_others(self, pipe, monkeypatch, words):
        read, threads = bodies.read_body, []

        def noting(data, model):
            threads.append(threading.current_thread())
            return read(data, model)

        monkeypatch.setattr(bodies, "read_body", noting)
        async with client(pipe) as http:
            reply = await http.post(CHAT, json=user("word " * words))
            other = await http.post(TEXT, json={"prompt": [[5] * 50_000, "x"]})
        assert reply.status_code == (200 if words == 100 else 400)
        assert (other.status_code, error_of(other)["param"]) == (400, "prompt")
        here = [thread is threading.current_thread() for thread in threads]
        assert here == [words == 100, False]

    async def test_a_closed_engine_reads_no_more(self):
        with pipe_with_template(check=False) as pipe:
            await pipe.aclose()
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user("word " * 40_000))
        assert (reply.status_code, error_of(reply)["code"]) == (503, "engine_closed")

    async def test_a_body_that_waits_for_its_thread_when_the_engine_closes_gets_503(self, monkeypatch):
        hold, begun = threading.Event(), threading.Semaphore(0)

        def block():
            begun.release()
            hold.wait(20)

        with pipe_with_template(check=False) as pipe:
            for _ in range(2):
                pipe.engine.text_pool.submit(block)
                begun.acquire()
            async with client(pipe) as http:
                asked = asyncio.create_task(http.post(CHAT, json=user("word " * 40_000)))
                await asyncio.sleep(0.05)
                assert not asked.done()
                await pipe.aclose()
                reply = await asked
            hold.set()
        assert (reply.status_code, error_of(reply)["code"]) == (503, "engine_closed")

    def test_arguments_of_tool_calls_are_objects_once_read(self):
        call = {"function": {"name": "f", "arguments": '{"a": [1]}'}}
        body = user() | {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
        read = bodies.read_body(json.dumps(body).encode(), ChatRequest)
        assert read.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
        body["messages"][0]["tool_calls"] = "f"
        with pytest.raises(ApiError, match="tool_calls of a message must be a list"):
            bodies.read_body(json.dumps(body).encode(), ChatRequest)


@contextlib.asynccontextmanager
async def connected(url):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def head(path=CHAT, **headers):
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{named}\r\n".encode()


async def answer(reader):
    """Status and error code of an answer with a length."""
    top = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = next(int(line[16:]) for line in top.decode().lower().split("\r\n") if line.startswith("content-length"))
    body = json.loads(await asyncio.wait_for(reader.readexactly(length), 5))
    return int(top[9:12]), body.get("error", {}).get("code"), top.decode().lower()


class TestSizes:
    async def test_a_large_body_is_refused_announced_or_in_chunks(self, pipe):
        async def chunks():
            for _ in range(10):
                yield b"x" * 300

        async with client(pipe, max_body_bytes=1000) as http:
            announced = await http.post(CHAT, json=user("x" * 2000))
            chunked = await http.post(CHAT, content=chunks(), headers=JSON)
            small = await http.post(CHAT, json=user())
        assert (announced.status_code, error_of(announced)["code"]) == (413, "request_too_large")
        assert (chunked.status_code, error_of(chunked)["code"]) == (413, "request_too_large")
        assert small.status_code == 200

    @pytest.mark.parametrize("expect", [{}, {"Expect": "100-continue"}])
    def test_an_announced_one_is_refused_before_it_is_sent(self, pipe, expect):
        async def main(url):
            async with connected(url) as (reader, writer):
                writer.write(head(Content_Length=2**40, **expect))
                return await answer(reader)

        with served(pipe) as url:
            status, code, top = asyncio.run(main(url))
        assert (status, code) == (413, "request_too_large")
        assert ("connection: close" in top) == bool(expect)

    def test_one_in_chunks_is_refused_once_it_passes_the_bound(self, pipe):
        async def main(url):
            async with connected(url) as (reader, writer):
                writer.write(head(Transfer_Encoding="chunked") + b"7d0\r\n" + b"x" * 2000 + b"\r\n")
                found = await answer(reader)
                # the end of it, and another request
                writer.write(b"5\r\nhello\r\n0\r\n\r\n" + head(Content_Length=2) + b"{}")
                return found, await answer(reader)

        with served(pipe, max_body_bytes=1000) as url:
            first, second = asyncio.run(main(url))
        assert first[:2] == (413, "request_too_large")
        assert second[:2] == (400, "missing_parameter")

    def test_who_sends_everything_before_reading_gets_the_answer_too(self, pipe):
        async def main(url):
            async with connected(url) as (reader, writer):
                writer.write(head(Content_Length=20_000_000, Connection="close"))
                for _ in range(20):
                    writer.write(b"x" * 1_000_000)
                    await writer.drain()
                return await answer(reader)

        with served(pipe, max_body_bytes=1000) as url:
            assert asyncio.run(main(url))[0] == 413


class TestStalled:
    def test_a_body_that_stops_is_given_up(self, pipe):
        async def main(url):
            async with connected(url) as (reader, writer):
                writer.write(head(Content_Length=100) + b"{")
                return await answer(reader), await asyncio.wait_for(reader.read(), 5)

        with served(pipe, body_timeout_s=0.1) as url:
            (status, code, top), end = asyncio.run(main(url))
        assert (status, code, end) == (408, "request_timeout", b"")
        assert "connection: close" in top

    @pytest.mark.parametrize("length", [100, 2**40])
    def test_is_not_waited_for_when_the_server_ends(self, length):
        async def main(server, url):
            async with connected(url) as (reader, writer):
                writer.write(head(Content_Length=length) + b"{")
                await asyncio.sleep(0.2)
                server.send_signal(signal.SIGTERM)
                return await answer(reader)

        with process("--shutdown-timeout", "20") as (server, url):
            status, code, _ = asyncio.run(main(server, url))
            begun = time.monotonic()
            _, err = server.communicate(timeout=20)
        assert (status, code) == ((503, "engine_closed") if length == 100 else (413, "request_too_large"))
        assert time.monotonic() - begun < 5
        assert server.returncode == 0
        assert "Traceback" not in err

    @pytest.mark.parametrize("signals", [1, 2])
    def test_who_does_not_read_an_answer_is_not_waited_for(self, signals):
        async def main(server, url):
            body = json.dumps({"prompt": "word " * 900, "stream": True, "n": 64}).encode()
            async with connected(url) as (_, writer):
                writer.transport.pause_reading()
                writer.write(head(TEXT, Content_Length=len(body)) + body)
                await asyncio.sleep(1)
                for _ in range(signals):
                    server.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.1)
                return await asyncio.to_thread(server.communicate, timeout=20)

        with process("--shutdown-timeout", "0.1") as (server, url):
            _, err = asyncio.run(main(server, url))
        assert server.returncode == 0
        assert "Traceback" not in err
