"""Errors, keys, origins, sizes: what a server owes itself and its clients."""

import asyncio

import pytest

from corogen.adapters.server.auth import read_keys
from corogen.adapters.server.errors import STATUS, to_api_error
from corogen.adapters.server.settings import ServerSettings
from corogen.errors import ConfigError, CorogenError, EngineClosed, QueueFullError, RequestTimeout, WorkerDied
from tests.adapters.helpers import ENDLESS
from tests.server.helpers import CHAT, TEXT, client, endless, error_of, logged, pipe_with_template, user


@pytest.fixture
def pipe():
    with pipe_with_template() as pipe:
        yield pipe


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"temperature": "x"}, "temperature"),
            ({"temperature": -1}, "temperature"),
            ({"temperature": 3.5}, "temperature"),
            ({"top_p": 0}, "top_p"),
            ({"messages": "hi"}, "messages"),
            ({"messages": []}, "messages"),
            ({"messages": [{"content": "x"}]}, "messages"),
            ({"messages": [5]}, "messages"),
            ({"n": 10_000_000}, "n"),
            ({"n": 0}, "n"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"seed": 2**70}, "seed"),
            ({"stop": [""]}, "stop"),
            ({"stop": 5}, "stop"),
            ({"min_tokens": -1}, "min_tokens"),
            ({"stop_token_ids": [10**6]}, "stop_token_ids"),
            ({"stream": "yes"}, "stream"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"stream": True, "stream_options": {"what": 1}}, "stream_options"),
            ({"logprobs": True}, "logprobs"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"logit_bias": {"5": 1}}, "logit_bias"),
            ({"best_of": 10_000_000}, "best_of"),
            ({"max_token": 5}, "max_token"),
        ],
    )
    async def test_a_bad_field_is_named(self, pipe, change, param):
        async with client(pipe) as http:
            reply = await http.post(CHAT, json=user(**change))
        assert reply.status_code == 400
        error = error_of(reply)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)

    async def test_fields_that_ask_for_nothing_are_taken(self, pipe):
        nothing = {
            "logprobs": False,
            "tools": [],
            "response_format": {"type": "text"},
            "logit_bias": None,
            "user": "me",
        }
        more = {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "presence_penalty": 0, "stop": None}
        async with client(pipe) as http:
            assert (await http.post(CHAT, json=user(**nothing, **more))).status_code == 200
            assert (await http.post(TEXT, json={"prompt": "x", "suffix": "", "max_tokens": 1})).status_code == 200

    async def test_a_misspelt_field_is_answered_with_the_right_one(self, pipe):
        async with client(pipe) as http:
            reply = await http.post(CHAT, json=user(max_token=5))
        assert "did you mean max_tokens" in error_of(reply)["message"]

    async def test_messages_name_fields_as_they_are_over_http(self, pipe):
        async with client(pipe) as http:
            error = error_of(await http.post(CHAT, json=user(seed=2**70)))
            too_long = error_of(await http.post(CHAT, json=user("x" * 5000)))
        assert error["message"].startswith("seed must be")
        assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", "messages")

    async def test_what_is_no_json_object(self, pipe):
        async with client(pipe) as http:
            headers = {"content-type": "application/json"}
            for body in ("{", "[]", '"x"', "", "null", "[" * 100_000):
                reply = await http.post(CHAT, content=body, headers=headers)
                assert reply.status_code == 400
                assert error_of(reply)["type"] == "invalid_request_error"
            assert "Content-Type" in error_of(await http.post(CHAT, content="{}"))["message"]

    async def test_unknown_paths_methods_and_models(self, pipe):
        async with client(pipe) as http:
            assert error_of(await http.get("/nothing"))["code"] == "not_found"
            wrong = await http.get(CHAT)
            assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
            assert wrong.headers["allow"] == "POST"
            for name in ("other", ""):
                reply = await http.post(CHAT, json=user(model=name))
                assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")

    async def test_a_full_queue_says_when_to_come_again(self):
        with endless(queue_size=1) as pipe:
            held = pipe.stream_infer("x" * 50, ENDLESS)
            async with client(pipe) as http:
                replies = [await http.post(CHAT, json=user(stream=stream)) for stream in (False, True)]
            held.close()
        for reply in replies:
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
            assert error_of(reply)["code"] == "queue_full"
            assert error_of(reply)["message"] == "the server is full (1 running and waiting requests): try again later"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_deadline_that_passes_is_504(self, stream):
        with endless(max_batch_size=1) as pipe:
            held = pipe.stream_infer("x" * 50, ENDLESS)
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user(stream=stream, queue_timeout_s=0.05))
                metrics = (await http.get("/metrics")).text
            held.close()
        assert (reply.status_code, error_of(reply)["code"]) == (504, "timeout")
        assert 'corogen_requests_ended_total{finished_reason="timeout",model_name="tiny"} 1.0' in metrics

    async def test_a_closed_engine_is_unavailable(self):
        with pipe_with_template(check=False) as pipe:
            await pipe.aclose()
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user())
                health = await http.get("/health")
                metrics = await http.get("/metrics")
        assert (reply.status_code, error_of(reply)["code"]) == (503, "engine_closed")
        assert (health.status_code, health.json()) == (503, {"status": "closed"})
        assert metrics.status_code == 200

    async def test_a_fault_of_ours_is_a_500_that_tells_nothing(self, pipe, monkeypatch):
        def broken(prompt, *args, **options):
            raise ZeroDivisionError(prompt)

        monkeypatch.setattr(pipe.engine, "prepare", broken)
        with logged() as lines:
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user("SECRET-123"))
        assert reply.status_code == 500
        assert error_of(reply)["type"] == "server_error"
        assert "SECRET" not in reply.text
        assert "SECRET" not in "".join(lines)
        assert any("ZeroDivisionError" in line and "calls.py" in line for line in lines)

    def test_every_error_has_a_status_and_its_code(self):
        settings = ServerSettings()
        assert to_api_error(QueueFullError(1, 1), settings).status == 429
        assert to_api_error(RequestTimeout("late"), settings).status == 504
        assert to_api_error(EngineClosed("closed"), settings).headers == {"Retry-After": "1"}
        died = to_api_error(WorkerDied(0, -9, "Traceback of the worker"), settings)
        assert (died.status, died.code) == (503, "worker_died")
        assert "Traceback" not in died.message
        assert CorogenError in STATUS


class TestKeys:
    async def test_every_route_but_health_asks_for_one(self, pipe):
        async with client(pipe, api_keys=("one", "two")) as http:
            for headers in (
                {},
                {"authorization": "Bearer three"},
                {"authorization": "one"},
                {"authorization": "Basic one"},
            ):
                reply = await http.post(CHAT, json=user(), headers=headers)
                assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key")
                assert reply.headers["www-authenticate"] == "Bearer"
                assert (await http.get("/v1/models", headers=headers)).status_code == 401
                assert (await http.get("/health", headers=headers)).status_code == 200
            for key in ("one", "two"):
                reply = await http.post(CHAT, json=user(), headers={"authorization": f"Bearer {key}"})
                assert reply.status_code == 200

    async def test_a_prefix_of_a_proxy_opens_nothing(self, pipe):
        async with client(pipe, api_keys=("one",), root_path="/llm") as http:
            for prefix in ("/llm", "/llm/llm"):  # taken off by the proxy, or not
                assert (await http.get(f"{prefix}/health")).status_code == 200
                assert (await http.get(f"{prefix}/v1/models")).status_code == 401
            assert (await http.get("/llm/v1/models", headers={"authorization": "bearer one"})).status_code == 200

    def test_come_from_a_file_and_the_environment(self, tmp_path):
        file = tmp_path / "keys"
        file.write_text("one  # Ada\n\n# two\nthree\n")
        assert read_keys(file, {"COROGEN_API_KEYS": "four, one,"}) == ("four", "one", "three")
        assert read_keys(None, {}) == ()

    @pytest.mark.parametrize("content", [None, "", "# none\n", "gr\u00fc\u00df\n", "two words\n"])
    def test_a_file_without_a_usable_key_is_refused(self, tmp_path, content):
        file = tmp_path / "keys"
        if content is not None:
            file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError):
            read_keys(file, {})


class TestOrigins:
    async def test_preflight_needs_no_key(self, pipe):
        ask = {
            "origin": "https://chat.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        async with client(pipe, api_keys=("one",), cors_origins=("https://chat.example",)) as http:
            reply = await http.options(CHAT, headers=ask)
            refused = await http.post(CHAT, json=user(), headers={"origin": "https://chat.example"})
            foreign = await http.options(CHAT, headers={**ask, "origin": "https://evil.example"})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in reply.headers["access-control-allow-headers"]
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")
        assert "access-control-allow-origin" not in foreign.headers


class TestIds:
    async def test_a_clients_request_id_comes_back_and_is_logged(self, pipe):
        with logged() as lines:
            async with client(pipe) as http:
                reply = await http.post(CHAT, json=user(), headers={"x-request-id": "mine-7"})
                other = await http.post(CHAT, json=user())
        assert reply.headers["x-request-id"] == "mine-7"
        assert reply.json()["id"] == "chatcmpl-mine-7"
        assert len(other.headers["x-request-id"]) == 32
        [line] = [line for line in lines if "mine-7" in line]
        assert "status=200" in line
        assert "prompt_tokens=5 completion_tokens=12" in line

    @pytest.mark.parametrize("given", ["two words", "x" * 200, "", "a\x7fb"])
    async def test_an_id_that_could_not_stand_in_a_log_is_replaced(self, pipe, given):
        async with client(pipe) as http:
            reply = await http.post(CHAT, json=user(), headers={"x-request-id": given})
        assert len(reply.headers["x-request-id"]) == 32

    async def test_two_requests_with_the_same_id_get_their_own_answers(self, pipe):
        async with client(pipe) as http:
            headers = {"x-request-id": "id"}
            first, second = await asyncio.gather(
                *(http.post(CHAT, json=user(text, request_id="id"), headers=headers) for text in ("abcd", "wxyz"))
            )
        assert first.json()["choices"][0]["message"]["content"] == "abcd" * 3
        assert second.json()["choices"][0]["message"]["content"] == "wxyz" * 3
