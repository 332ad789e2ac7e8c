"""HTTP servers around an engine: public failures of other servers, as they should have gone."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from corogen.adapters.pipeline import pipeline
from corogen.adapters.server.health import Pulse
from corogen.errors import WorkerError
from corogen.testing.tiny import tiny_model
from tests.adapters.helpers import assert_nothing_runs
from tests.conftest import eventually
from tests.engine.helpers import tokenizer
from tests.server.helpers import (
    CHAT,
    TEXT,
    answering,
    client,
    encode,
    endless,
    error_of,
    events_of,
    finishes,
    joined,
    logged,
    pipe_with_template,
    served,
    user,
)
from tests.server.test_lifecycle import process, question


async def close_after(seconds, url, body):
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        with pytest.raises((httpx.TimeoutException, httpx.ReadTimeout)):
            await http.post(CHAT, json=body, timeout=seconds)


class TestLeaving:
    def test_a_closed_socket_ends_a_request_that_is_not_streamed(self):
        """vllm-project/vllm#10806: requests went on after the client had left."""
        with endless() as pipe, served(pipe) as url:
            body = user("Write a ballad of two hundred verses.") | {"ignore_eos": True, "max_tokens": 15_000}
            free = pipe.stats().blocks_free
            asyncio.run(close_after(0.3, url, body))
            assert eventually(lambda: not (pipe.stats().running or pipe.stats().waiting), 1)
            assert_nothing_runs(pipe)
            stats = pipe.stats()
            assert stats.blocks_free + stats.blocks_cached == free
            assert stats.ended["abort"] == 1

    def test_twenty_streams_that_drop_at_once_leave_nothing_running(self):
        """vllm-project/vllm#29928: metrics showed running requests for ever after their clients had gone."""

        async def drop_all(url):
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                body = user(stream=True) | {"max_tokens": 15_000}
                tasks = [asyncio.create_task(http.post(CHAT, json=body)) for _ in range(20)]
                while pipe.stats().running < 20:
                    await asyncio.sleep(0.001)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        with endless() as pipe, served(pipe) as url:
            asyncio.run(drop_all(url))
            assert_nothing_runs(pipe)
            scraped = httpx.get(f"{url}/metrics").text
            assert 'corogen_num_requests_running{model_name="tiny"} 0.0' in scraped
            assert 'corogen_num_requests_waiting{model_name="tiny"} 0.0' in scraped
            assert 'corogen_kv_cache_usage_perc{model_name="tiny"} 0.0' in scraped
            assert httpx.get(f"{url}/health").status_code == 200


class TestShapes:
    @pytest.mark.parametrize("path", [CHAT, TEXT])
    async def test_usage_comes_last_and_counts_the_prompt_once(self, path):
        """vllm-project/vllm#6371: usage of streams with several choices."""
        body = {"n": 2, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": "abcde"}]} if path == CHAT else {"prompt": "abcde"}
        with pipe_with_template() as pipe:
            async with client(pipe) as http:
                *others, last = events_of((await http.post(path, json=body)).text)
        assert all(event["usage"] is None for event in others)
        assert last["choices"] == []
        usage = last["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 12, 17)

    @pytest.mark.parametrize(
        ("path", "field"), [(CHAT, {"logprobs": True, "top_logprobs": 2}), (TEXT, {"logprobs": 2})]
    )
    async def test_logprobs_are_refused_by_name(self, path, field):
        """vllm-project/vllm#3179: logprobs in a shape that clients could not read. Not there yet: never ignored."""
        body = user(**field) if path == CHAT else {"prompt": "x", **field}
        with pipe_with_template() as pipe:
            async with client(pipe) as http:
                for stream in (False, True):
                    error = error_of(await http.post(path, json={**body, "stream": stream}))
                    assert (error["param"], error["code"]) == ("logprobs", "unsupported_feature")

    async def test_a_history_with_tool_calls_reaches_the_template(self):
        """lmstudio-ai/lmstudio-bug-tracker#261: content null beside tool calls was refused, or shown as "None"."""
        template = (
            "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
        )
        call = {"id": "c1", "type": "function", "function": {"name": "lookup_value", "arguments": '{"q": 1}'}}
        messages = [
            {"role": "user", "content": "Look it up"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "17.5"},
        ]
        with pipe_with_template(template=template) as pipe:
            async with client(pipe) as http:
                reply = await http.post(CHAT, json={"messages": messages, "stream": True, "max_tokens": 2})
                ids = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
        assert reply.status_code == 200
        assert tokenizer().decode(ids) == '[user:Look it up][assistant:lookup_value={"q": 1}][tool:17.5]'

    async def test_text_parts_are_one_text_and_other_parts_are_refused(self):
        """vllm-project/vllm#16245: a list of text parts broke templates that add strings."""
        parts = [{"type": "text", "text": "Explain "}, {"type": "text", "text": "RoPE"}]
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        with pipe_with_template(template="{% for m in messages %}{{ 'x' + m.content }}{% endfor %}") as pipe:
            async with client(pipe) as http:
                bodies = [[{"role": r, "content": c} for r in ("system", "user")] for c in (parts, "Explain RoPE")]
                asked = [await http.post(CHAT, json={"messages": m, "max_tokens": 9}) for m in bodies]
                refused = await http.post(CHAT, json={"messages": [{"role": "user", "content": image}]})
        assert asked[0].json()["choices"] == asked[1].json()["choices"]
        assert refused.status_code == 400
        assert "image_url" in error_of(refused)["message"]

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({}, "stop"),
            ({"stop": " two"}, "stop"),
            ({"stop_token_ids": encode("w")[-1:]}, "stop"),
            ({"max_tokens": 2}, "length"),
            ({"ignore_eos": True}, "length"),
        ],
        ids=["end token", "stop string", "stop id", "bound", "context"],
    )
    async def test_only_openais_finish_reasons_are_said(self, settings, reason):
        """huggingface/text-generation-inference#2344: "eos_token" and others, which clients do not know."""
        with answering("one two three", fake={"max_positions": 64}) as pipe:
            async with client(pipe) as http:
                body = {"messages": [{"role": "user", "content": "abcde"}], **settings}
                whole = (await http.post(CHAT, json=body)).json()
                events = events_of((await http.post(CHAT, json={**body, "stream": True})).text)
        assert whole["choices"][0]["finish_reason"] == reason
        assert finishes(events) == [reason]
        assert joined(events) == whole["choices"][0]["message"]["content"]

    async def test_lists_of_prompts_with_choices_and_echo(self):
        """openai/openai-python#90: which choice belongs to which prompt."""
        body = {"prompt": ["example 1", "example 2"], "n": 2, "echo": True, "max_tokens": 4}
        with pipe_with_template() as pipe:
            async with client(pipe) as http:
                whole = (await http.post(TEXT, json=body)).json()["choices"]
                events = events_of((await http.post(TEXT, json={**body, "stream": True})).text)
        assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
        for choice in whole:
            assert choice["text"].startswith(body["prompt"][choice["index"] // 2])
            assert joined(events, choice["index"]) == choice["text"]
            assert len(finishes(events, choice["index"])) == 1

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    async def test_one_rule_for_the_bound_on_new_tokens(self, path):
        """vllm-project/vllm#19861: capped by the context; without one, what the context holds and not 16."""
        body = {"messages": [{"role": "user", "content": "x" * 40}]} if path == CHAT else {"prompt": "x" * 40}
        bounds = [{}, {"max_tokens": 100}, {"max_tokens": 5}]
        if path == CHAT:
            bounds += [{"max_completion_tokens": 100}, {"max_completion_tokens": 5, "max_tokens": 7}]
        with pipe_with_template(fake={"max_positions": 64}) as pipe:
            async with client(pipe) as http:
                replies = [(await http.post(path, json={**body, **bound})).json() for bound in bounds]
        assert [reply["usage"]["completion_tokens"] for reply in replies] == [24, 24, 5, 24, 5][: len(bounds)]
        assert {reply["choices"][0]["finish_reason"] for reply in replies} == {"length"}

    async def test_tokens_are_counted_alike_with_and_without_streaming_after_a_preemption(self):
        """vllm-project/vllm#8625: streams counted pieces, and preempted prompts twice."""
        text = "grüße 🎉 " * 4
        with answering(text, fake={"num_blocks": 24}, block_size=4) as pipe:
            async with client(pipe) as http:
                options = {"stream_options": {"include_usage": True}, "stream": True}
                bodies = [user("abcdefgh" * i) | {"max_tokens": 60} for i in range(1, 5)]
                whole = [(await http.post(CHAT, json=body)).json()["usage"] for body in bodies]
                streams = await asyncio.gather(*(http.post(CHAT, json=body | options) for body in bodies))
            assert pipe.stats().preemptions
        for alone, stream in zip(whole, streams, strict=True):
            counted = events_of(stream.text)[-1]["usage"]
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert [counted[name] for name in names] == [alone[name] for name in names]


class TestErrors:
    async def test_every_error_has_openais_envelope(self):
        """vllm-project/vllm#12886: a raw 422 and other bodies that clients could not read."""
        with pipe_with_template() as pipe:
            async with client(pipe, api_keys=("k",), max_body_bytes=5000) as http:
                key = {"authorization": "Bearer k"}
                given = {**key, "content-type": "application/json"}
                replies = {
                    400: [await http.post(CHAT, json=user(temperature=value), headers=key) for value in ("x", -1, 3.5)]
                    + [
                        await http.post(CHAT, content="{broken", headers=given),
                        await http.post(CHAT, json={"messages": "hi"}, headers=key),
                    ],
                    401: [await http.post(CHAT, json=user())],
                    404: [await http.post(CHAT, json=user(model="x"), headers=key), await http.get("/x", headers=key)],
                    405: [await http.put(CHAT, json=user(), headers=key)],
                    413: [await http.post(CHAT, json=user("x" * 9000), headers=key)],
                }
        for status, found in replies.items():
            for reply in found:
                assert (reply.status_code, bool(error_of(reply)["message"])) == (status, True)

    async def test_a_preflight_needs_no_key(self):
        """ggml-org/llama.cpp#6544: browsers could not call a server with a key."""
        headers = {
            "origin": "https://a.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        with pipe_with_template() as pipe:
            async with client(pipe, api_keys=("k",), cors_origins=("*",)) as http:
                assert (await http.options(CHAT, headers=headers)).is_success
                assert (await http.post(CHAT, json=user(), headers=headers)).status_code == 401

    async def test_another_models_name_is_not_found(self):
        """sgl-project/sglang#7035: any name was answered."""
        with pipe_with_template() as pipe:
            async with client(pipe, served_model_names=("tiny", "alias")) as http:
                assert error_of(await http.post(CHAT, json=user(model="no-such-model")))["code"] == "model_not_found"
                assert (await http.post(CHAT, json=user(model=""))).status_code == 404
                for body in (user(), user(model="alias")):
                    assert (await http.post(CHAT, json=body)).json()["model"] == "tiny"

    async def test_a_template_that_refuses_is_the_clients_fault(self):
        """sgl-project/sglang#892: "System role not supported" was an internal error."""
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        with pipe_with_template() as pipe:
            async with client(pipe) as http:
                reply = await http.post(CHAT, json={"messages": messages})
                assert (await http.post(CHAT, json=user())).status_code == 200
        assert reply.status_code == 400
        assert "System role not supported" in error_of(reply)["message"]
        assert "Traceback" not in reply.text

    async def test_more_than_the_queue_holds_gets_429_at_once(self):
        """vllm-project/vllm#18826: an unbounded queue; here one slot and five requests in all."""
        with endless(max_batch_size=1, queue_size=5) as pipe:
            async with client(pipe) as http:
                asked = await asyncio.gather(
                    *(http.post(CHAT, json=user(stream=i % 2 == 0) | {"max_tokens": 300}) for i in range(20))
                )
        refused = [reply for reply in asked if reply.status_code == 429]
        assert [reply.status_code for reply in asked].count(200) == 5
        assert len(refused) == 15
        assert all(reply.headers["retry-after"] and error_of(reply)["code"] == "queue_full" for reply in refused)


class TestOperation:
    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("millions", [(5, 27), pytest.param((5, 27, 45), marks=pytest.mark.slow)])
    def test_health_and_streams_go_on_while_huge_prompts_are_refused(self, millions):
        """vllm-project/vllm#24910: a huge message held up every other request."""
        slow, gaps = [], []

        async def watch(http, stop):
            while not stop.is_set():
                start = time.monotonic()
                assert (await http.get("/health")).status_code == 200
                slow.append(time.monotonic() - start)
                await asyncio.sleep(0.05)

        async def read(http, stop):
            while not stop.is_set():
                async with http.stream("POST", CHAT, json=question("word " * 200, stream=True)) as reply:
                    last = time.monotonic()
                    async for _ in reply.aiter_raw():
                        gaps.append(time.monotonic() - last)
                        last = time.monotonic()

        async def main(url):
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                stop = asyncio.Event()
                beside = [asyncio.create_task(work(http, stop)) for work in (watch, read)]
                headers = {"content-type": "application/json"}
                replies = [await http.post(CHAT, content=body, headers=headers) for body in huge]
                stop.set()
                await asyncio.gather(*beside)
                return replies

        words = "lorem ipsum dolor sit amet "
        huge = [json.dumps(user(words * (size * 10**6 // len(words)))).encode() for size in millions]
        with process("--max-body-mb", str(millions[-2] + 3)) as (_, url):
            *taken, refused = asyncio.run(main(url))
        for reply in taken:
            assert (reply.status_code, error_of(reply)["code"]) == (400, "context_length_exceeded")
        assert refused.status_code == 413
        print(f"slowest of {len(slow)} polls {max(slow):.3f} s, longest of {len(gaps)} gaps {max(gaps):.3f} s")
        assert max(slow) < 1, sorted(slow)[-5:]  # of which most is other work of the machine
        assert sorted(slow)[len(slow) * 9 // 10] < 0.2
        assert max(gaps) < 2, sorted(gaps)[-5:]
        assert sorted(gaps)[len(gaps) * 9 // 10] < 0.2

    async def test_dead_engines_and_deaf_ones_are_not_healthy(self):
        """sgl-project/sglang#6624: health said fine while nothing was served."""
        with pipe_with_template(check=False) as pipe:
            async with client(pipe) as http:
                assert (await http.get("/health")).status_code == 200
                pipe.engine.loop.call_soon_threadsafe(pipe.engine._give_up, WorkerError("gone"))
                assert eventually(lambda: pipe.engine.health.state.value == "failed")
                dead = await http.get("/health")
                refused = await http.post(CHAT, json=user())
        assert (dead.status_code, dead.json()) == (503, {"status": "failed"})
        assert refused.status_code == 503

    def test_a_long_step_is_no_stall(self):
        """sgl-project/sglang#6624: a long prefill is legal; the engine's loop answers meanwhile."""
        with pipe_with_template(fake={"step_time_s": 0.5}, check=False) as pipe:
            pulse, future = Pulse(pipe), pipe.submit("abc")
            assert eventually(lambda: pipe.stats().running)
            states = {pulse.state(0.25) for _ in range(2)}
            threading.Event().wait(0.3)
            assert states | {pulse.state(0.25)} == {"ready"}
            future.cancel()

    async def test_metrics_are_there_before_traffic_and_count_exactly(self, monkeypatch, tmp_path):
        """vllm-project/vllm#8612: a registry that broke with PROMETHEUS_MULTIPROC_DIR, or with a second engine."""
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        with pipe_with_template() as pipe, pipe_with_template() as other:
            async with client(pipe) as http, client(other) as second:
                before = (await http.get("/metrics")).text
                await http.post(CHAT, json=user("abcde"))
                after, elsewhere = (await http.get("/metrics")).text, (await second.get("/metrics")).text
        for name in (
            "requests_ended",
            "generation_tokens",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
        ):
            assert f"# HELP corogen_{name}" in before
        assert 'corogen_generation_tokens_total{model_name="tiny"} 0.0' in before
        assert 'corogen_generation_tokens_total{model_name="tiny"} 12.0' in after
        assert 'corogen_generation_tokens_total{model_name="tiny"} 0.0' in elsewhere

    def test_the_same_request_id_twice_is_two_requests(self):
        """vllm-project/vllm#10583: two requests with one id got each other's answers."""

        async def main(url):
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                headers = {"x-request-id": "id"}
                held = asyncio.create_task(
                    http.post(CHAT, json=user("abcd", request_id="id") | {"max_tokens": 15_000}, headers=headers)
                )
                while not pipe.stats().running:
                    await asyncio.sleep(0.001)
                second = await http.post(CHAT, json=user("wxyz", request_id="id"), headers=headers)
                held.cancel()
                await asyncio.wait([held])
                return second

        with endless() as pipe, served(pipe) as url:
            second = asyncio.run(main(url))
            assert second.json()["choices"][0]["message"]["content"] == "wxyz" * 3
            assert second.headers["x-request-id"] == "id"
            assert_nothing_runs(pipe)
            assert pipe.stats().ended == {"length": 1, "abort": 1}

    async def test_prompts_never_reach_the_log(self, monkeypatch):
        """vllm-project/vllm#1240: every prompt stood in the log."""
        with pipe_with_template() as pipe, logged() as lines:
            async with client(pipe) as http:
                await http.post(CHAT, json=user("SECRET-123"))
                await http.post(CHAT, json=user("SECRET-123 " * 20_000))
                await http.post(CHAT, json={"messages": "SECRET-123"})
                await http.post(CHAT, json=user("x", stop=["SECRET-123", ""]))

                def broken(prompt, *args, **options):
                    raise RuntimeError(prompt)

                monkeypatch.setattr(pipe.engine, "prepare", broken)
                assert (await http.post(CHAT, json=user("SECRET-123"))).status_code == 500
        assert len([line for line in lines if "path=/v1/chat" in line]) == 5
        assert "SECRET" not in "".join(lines)

    def test_from_the_greeting_on_the_first_chat_works(self):
        """gpustack/gpustack#6203: ready was said before the model was."""
        with process() as (_, url):
            assert httpx.post(url + CHAT, json=question()).status_code == 200


def test_a_completion_on_a_host_whose_name_leads_nowhere(monkeypatch, tmp_path):
    """hpcaitech/EnergonAI#215: the server hung at its first request when the host's name did not resolve."""
    import socket

    def refuse(*args, **options):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    monkeypatch.setattr(socket, "gethostbyname", refuse)
    with pipeline(tiny_model(tmp_path, with_tokenizer=True)) as pipe, served(pipe) as url:
        body = {"prompt": "Q: which river flows through Rome? A:", "max_tokens": 10, "ignore_eos": True}
        reply = httpx.post(url + TEXT, json=body, timeout=60)
    assert reply.json()["usage"]["completion_tokens"] == 10
