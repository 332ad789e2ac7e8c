"""Models, health, metrics, schema."""

import threading

import pytest

from corogen.adapters.server.health import Pulse
from corogen.adapters.server.logging import JsonFormatter
from corogen.adapters.server.metrics import Histogram
from tests.conftest import eventually
from tests.server.helpers import CHAT, TEXT, client, pipe_with_template, user


@pytest.fixture
def pipe():
    with pipe_with_template() as pipe:
        yield pipe


class TestModels:
    async def test_every_served_name_is_listed(self, pipe):
        async with client(pipe, served_model_names=("tiny", "org/alias")) as http:
            listed = (await http.get("/v1/models")).json()
            one = await http.get("/v1/models/org/alias")
            other = await http.get("/v1/models/other")
        assert [model["id"] for model in listed["data"]] == ["tiny", "org/alias"]
        assert listed["data"][0]["max_model_len"] == 4096
        assert (one.status_code, one.json()["id"]) == (200, "org/alias")
        assert other.status_code == 404

    async def test_version_and_schema(self, pipe):
        async with client(pipe) as http:
            assert (await http.get("/version")).json()["version"]
            schema = (await http.get("/openapi.json")).json()
            assert (await http.get("/docs")).status_code == 200
        assert {CHAT, TEXT, "/generate", "/generation", "/tokenize", "/health"} <= set(schema["paths"])
        assert schema["components"]["schemas"]["ChatRequest"]["example"]["messages"]


class TestHealth:
    @pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/v1/models"])
    async def test_head_is_answered_like_get(self, pipe, path):
        async with client(pipe) as http:
            assert (await http.head(path)).status_code == 200

    async def test_ready_then_closed(self, pipe):
        async with client(pipe) as http:
            assert (await http.get("/health")).json() == {"status": "ready"}

    def test_a_deaf_engine_is_noticed_and_forgiven_once_it_moves(self, pipe):
        pulse, block, entered = Pulse(pipe), threading.Event(), threading.Event()

        def hold():
            entered.set()
            block.wait(10)

        pipe.engine.loop.call_soon_threadsafe(hold)
        entered.wait(10)
        assert pulse.state(0.0) == "ready"  # the first look only knocks
        assert eventually(lambda: pulse.state(0.01) == "stalled")
        assert pulse.state(60) == "ready"
        block.set()
        assert eventually(lambda: pulse.state(0.01) == "ready")


class TestMetrics:
    async def test_every_series_is_there_before_any_request(self, pipe):
        async with client(pipe) as http:
            reply = await http.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        for name in (
            "corogen_num_requests_running", "corogen_num_requests_waiting", "corogen_kv_cache_usage_perc",
            "corogen_prompt_tokens", "corogen_generation_tokens", "corogen_time_to_first_token_seconds",
            "corogen_inter_token_latency_seconds", "corogen_e2e_request_latency_seconds", "corogen_requests_ended",
            "corogen_request_queue_time_seconds", "corogen_engine_step_seconds",
        ):  # fmt: skip
            assert f"# HELP {name}" in reply.text
            assert f"# TYPE {name}" in reply.text

    async def test_counters_grow_by_exactly_what_was_used(self, pipe):
        async with client(pipe) as http:
            await http.post(CHAT, json=user("abcde"))
            await http.post(CHAT, json=user("abcde", stream=True, n=2))
            text = (await http.get("/metrics")).text
        assert 'corogen_prompt_tokens_total{model_name="tiny"} 10.0' in text
        assert 'corogen_generation_tokens_total{model_name="tiny"} 36.0' in text
        assert 'corogen_requests_ended_total{finished_reason="length",model_name="tiny"} 3.0' in text
        assert 'corogen_time_to_first_token_seconds_count{model_name="tiny"} 3.0' in text
        assert 'corogen_e2e_request_latency_seconds_count{model_name="tiny"} 3.0' in text
        assert f'corogen_http_requests_total{{path="{CHAT}",status="200"}} 2.0' in text

    async def test_two_servers_in_one_process_do_not_meet(self, pipe, tmp_path, monkeypatch):
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
        async with client(pipe) as one, client(pipe) as two:
            await one.post(CHAT, json=user())
            assert 'corogen_prompt_tokens_total{model_name="tiny"} 5.0' in (await one.get("/metrics")).text
            assert 'corogen_prompt_tokens_total{model_name="tiny"} 0.0' in (await two.get("/metrics")).text

    def test_a_histogram_counts_its_upper_ends_in(self):
        histogram = Histogram("x", "words", (1, 2))
        for value in (0.5, 1, 1.5, 2, 9):
            histogram.observe(value)
        found = {sample.labels.get("le"): sample.value for sample in histogram.family("m").samples}
        assert (found["1"], found["2"], found["+Inf"]) == (2, 4, 5)


def test_a_log_line_can_be_json():
    import json
    import logging

    record = logging.LogRecord("corogen.server", logging.INFO, "", 0, "%s", ("a=1",), None)
    record.fields = {"a": 1}
    line = json.loads(JsonFormatter().format(record))
    assert (line["a"], line["level"]) == (1, "INFO")
    plain = logging.LogRecord("corogen", logging.INFO, "", 0, "hello", (), None)
    assert json.loads(JsonFormatter().format(plain))["message"] == "hello"
