"""`corogen bench serve` against a scripted server: what is asked, and what the figures say."""

import json
import threading

import pytest

from corogen.adapters.bench import serve_compare
from corogen.adapters.bench.figures import Timeline
from corogen.adapters.bench.serve import Ask, Load, Outcome, Target, figures, measure
from corogen.adapters.bench.serve_workload import asks_from, random_asks
from corogen.errors import InvalidRequest
from tests.adapters.cli_helpers import corogen
from tests.server.helpers import endless, pipe_with_template, served


@pytest.fixture(scope="module")
def url():
    with pipe_with_template(check=False) as pipe, served(pipe, api_keys=("k",)) as url:
        yield url


def bench(url, *options):
    return corogen("bench", "serve", "--url", url, "--api-key", "k", "--output-len", "5", "--json", "-q", *options)


def test_every_request_is_asked_and_counted(url):
    done = bench(url, "--num-prompts", "7", "--ignore-eos", "--goodput", "ttft:60000", "--goodput", "e2e:60000")
    found = json.loads(done.stdout)
    assert (found["benchmark"], found["model"], found["failed"]) == ("serve", "tiny", 0)
    assert (found["requests"], found["output_tokens"]) == (7, 35)
    assert found["goodput_per_s"] == found["requests_per_s"] > 0
    assert all(found[name]["p50"] >= 0 for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    assert found["ttft_ms"]["p50"] <= found["e2e_ms"]["p50"]


def test_random_prompts_go_to_completions(url):
    found = json.loads(bench(url, "--num-prompts", "3", "--input-len", "20", "--vocab-size", "200").stdout)
    assert (found["failed"], found["prompt_tokens"]) == (0, 60)


def test_arrivals_and_concurrency_are_bounded():
    with endless() as pipe, served(pipe) as url:
        asks = [Ask("abcde", 30) for _ in range(12)]
        found = measure(Target(url), asks, Load(rate=500, concurrency=3), objectives={})
        assert max(record.running for record in pipe.step_log(4096)) == 3
    assert (found["failed"], found["concurrency"], found["rate"]) == (0, 3, 500)


def test_failures_are_counted_and_the_first_is_shown(url):
    done = corogen("bench", "serve", "--url", url, "--served-model", "tiny", "--api-key", "wrong", "--num-prompts", "2")
    assert done.exit_code == 1
    assert "401" in done.stdout


def test_a_server_that_is_not_there_is_an_error():
    done = corogen("bench", "serve", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "--served-model" in done.stderr


@pytest.mark.parametrize("options", [["--request-rate", "0"], ["--request-rate", "x"], ["--goodput", "itl:5"]])
def test_nonsense_is_a_usage_error(options):
    assert corogen("bench", "serve", *options).exit_code == 2


def test_figures_of_known_outcomes():
    first = Outcome(Timeline(0.0, [0.1, 0.2, 0.4], [1, 1, 1]), ended=0.5, prompt_tokens=10, tokens=3)
    second = Outcome(Timeline(0.0), ended=0.2, error="500: no")
    found = figures([first, second], 2.0, {"ttft": 150, "tpot": 100})
    assert (found["requests"], found["failed"], found["first_failure"]) == (2, 1, "500: no")
    assert found["output_tok_per_s"] == 1.5
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    assert found["tpot_ms"]["p50"] == pytest.approx(150)
    assert found["e2e_ms"]["p50"] == pytest.approx(500)
    assert found["goodput_per_s"] == 0


def test_random_lengths_stay_in_their_range_and_repeat_with_their_seed():
    first, second = (random_asks(50, 40, 20, spread=0.5, vocab_size=1000, seed=3) for _ in range(2))
    assert first == second
    assert {20 <= len(ask.prompt) <= 40 and 10 <= ask.output_len <= 20 for ask in first} == {True}
    assert len({len(ask.prompt) for ask in first}) > 5


def test_conversations_of_a_usable_length_are_taken(tmp_path):
    def turns(*texts):
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    file = tmp_path / "sharegpt.json"
    good = turns("a question " * 5, "an answer " * 10)
    file.write_text(json.dumps([good, turns("x"), turns("x", "y"), turns("long " * 5000, "an answer " * 9)]))
    asks = asks_from(file, 3, 64, seed=0)
    assert asks == [Ask([{"role": "user", "content": "a question " * 5}], 25)] * 3
    file.write_text("[]")
    with pytest.raises(InvalidRequest):
        asks_from(file, 3, 64, seed=0)


def test_the_comparison_takes_both_sides_in_turns(url, monkeypatch):
    order = []

    async def side(name):
        order.append(name)
        return 1.0

    import asyncio

    found = asyncio.run(serve_compare._pairs(3, lambda i: side("here"), lambda i: side("http")))
    assert found == [(1.0, 1.0)] * 3
    assert order == ["http", "here", "here", "http", "http", "here", "here", "http"]


def test_the_comparison_over_a_scripted_pipeline():
    with pipe_with_template(check=False) as pipe, served(pipe) as url:
        found = serve_compare.measure(pipe, url, count=4, output_len=3, pairs=2, say=lambda line: None)
    assert len(found["ttft_added_ms"]["values"]) == 2
    assert found["seconds_ratio"]["median"] > 0
    assert not [thread for thread in threading.enumerate() if "bench" in thread.name]
