"""Clients that leave, streams that fail, and what a long silence looks like; over real sockets."""

import asyncio
import contextlib
import threading

import httpx
import pytest

from corogen.adapters.server.disconnect import ClientGone, unless_gone
from corogen.errors import StepFailed
from tests.adapters.helpers import ENDLESS, assert_nothing_runs
from tests.conftest import eventually
from tests.server.helpers import (
    CHAT,
    TEXT,
    client,
    endless,
    error_of,
    events_of,
    joined,
    logged,
    pipe_with_template,
    served,
    user,
)

LONG = {"max_tokens": 10_000}


async def leave_when(condition, url, path, body):
    """Send a request and close its connection once `condition()` holds."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        task = asyncio.create_task(http.post(path, json=body))
        while not condition():
            await asyncio.sleep(0.001)
            assert not task.done(), task.result().text
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate", "/generation"])
class TestLeaving:
    def body(self, path, stream):
        if path == CHAT:
            return user(stream=stream) | LONG
        body = {"prompt": "Hello", **LONG}
        return body if path == "/generation" else {**body, "stream": stream}

    def test_ends_the_request_while_it_runs(self, path, stream):
        with endless() as pipe, served(pipe) as url, logged() as lines:
            asyncio.run(leave_when(lambda: pipe.stats().steps > 5, url, path, self.body(path, stream)))
            assert_nothing_runs(pipe)
            assert pipe.stats().ended["abort"] == 1
            assert eventually(lambda: [line for line in lines if "disconnected=True" in line])

    def test_ends_the_request_before_its_first_token(self, path, stream):
        with (
            endless(max_batch_size=1) as pipe,
            served(pipe) as url,
            pipe.stream_infer("first", ENDLESS, do_preprocess=False) as held,
        ):
            next(held)
            asyncio.run(leave_when(lambda: pipe.stats().waiting, url, path, self.body(path, stream)))
            assert eventually(lambda: not pipe.stats().waiting, 1)
            assert pipe.stats().running == 1


class TestStreams:
    def test_a_long_silence_is_filled_with_comments(self):
        with endless(max_batch_size=1) as pipe, served(pipe, keep_alive_s=0.02) as url:
            held = pipe.stream_infer("first", ENDLESS, do_preprocess=False)
            seen = []
            with httpx.Client(timeout=30) as http, http.stream("POST", url + CHAT, json=user(stream=True)) as reply:
                for text in reply.iter_text():
                    seen.append(text)
                    if "".join(seen).count(": keep-alive") == 3:
                        held.close()
            events = events_of("".join(seen))
            assert joined(events) == "abcdeabcdeab"

    async def test_an_error_on_the_way_is_an_event_and_the_stream_ends(self):
        with pipe_with_template(
            fake={"fail_at": {5: RuntimeError("boom"), 6: RuntimeError("boom")}}, on_worker_failure="fail"
        ) as pipe:
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user(stream=True))
        *pieces, last = events_of(reply.text)
        assert reply.status_code == 200
        assert joined(pieces)
        assert last["error"]["code"] == StepFailed.code
        assert "boom" not in last["error"]["message"]

    async def test_the_same_error_without_streaming_is_a_status(self):
        with pipe_with_template(fake={"fail_at": {5: RuntimeError("boom")}}, on_worker_failure="fail") as pipe:
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user())
        assert (reply.status_code, error_of(reply)["code"]) == (503, StepFailed.code)

    @pytest.mark.parametrize("stream", [True, False])
    def test_an_abort_on_the_servers_side_is_an_error(self, stream):
        with endless() as pipe, served(pipe) as url:
            threading.Thread(
                target=lambda: eventually(lambda: pipe.stats().steps > 20, 20) and pipe.abort(), daemon=True
            ).start()
            reply = httpx.post(url + CHAT, json=user(stream=stream) | LONG, timeout=30)
            if stream:
                assert events_of(reply.text)[-1]["error"]["code"] == "aborted"
            else:
                assert (reply.status_code, error_of(reply)["code"]) == (503, "aborted")

    async def test_a_fault_of_ours_on_the_way_is_an_event_and_is_logged(self, monkeypatch):
        from corogen.adapters.server.chat import ChatEvents

        monkeypatch.setattr(ChatEvents, "end", lambda self: 1 / 0)
        with pipe_with_template() as pipe, logged() as lines:
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user(stream=True))
        assert events_of(reply.text)[-1]["error"]["type"] == "server_error"
        assert any("ZeroDivisionError" in line for line in lines)

    async def test_headers_keep_proxies_from_holding_events_back(self):
        with pipe_with_template() as pipe:
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user(stream=True))
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"
        assert "content-length" not in reply.headers


class TestUnlessGone:
    """The watcher itself."""

    @staticmethod
    async def never():
        await asyncio.Event().wait()

    async def test_work_that_ends_first_is_returned(self):
        async def work():
            return 5

        assert await unless_gone(self.never, work()) == 5

    async def test_a_disconnect_cancels_the_work(self):
        messages = [{"type": "http.request"}, {"type": "http.disconnect"}]
        ended = []

        async def receive():
            return messages.pop(0)

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        with pytest.raises(ClientGone):
            await unless_gone(receive, work())
        assert ended == [True]
        await asyncio.sleep(0)  # and the task is not left cancelled

    async def test_a_cancel_from_outside_stays_a_cancel(self):
        task = asyncio.create_task(unless_gone(self.never, self.never()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_nothing_is_left_running(self):
        with contextlib.suppress(ZeroDivisionError):

            async def work():
                return 1 / 0

            await unless_gone(self.never, work())
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
