"""`corogen bench`: options reach the measurement, results are tables or JSON, pairs alternate."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from corogen.adapters.bench import peer, throughput
from corogen.adapters.cli import bench as bench_module
from corogen.adapters.cli import tables
from corogen.outputs import Response
from tests.adapters.cli_helpers import ScriptedPipeline, corogen, pieces, use

FACTS = SimpleNamespace(admission=SimpleNamespace(facts=SimpleNamespace(vocab_size=1000)))


@pytest.fixture
def pipe(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline(pieces("a", "b", "c", "d", reason="length")))
    pipe.engine = FACTS
    return pipe


class ScriptedPeer:
    """Stands for the process of transformers; notes the order of things."""

    def __init__(self, pipe, *, tokens=4):
        self.pipe, self.tokens, self.runs, self.pid, self.versions = pipe, tokens, [], 1, {"torch": "2"}

    def __call__(self, folder, threads):
        self.folder, self.threads = folder, threads
        return contextlib.nullcontext(self)

    def run(self, kind, prompts, new):
        self.runs.append((kind, len(prompts), new, len(self.pipe.asked)))
        ids = [[101, 102, 103, 104][: self.tokens] for _ in prompts]
        return {"seconds": 0.5, "tokens": self.tokens * len(prompts), "ids": ids}


@pytest.fixture
def against(monkeypatch, pipe):
    scripted = ScriptedPeer(pipe)
    monkeypatch.setattr(throughput, "PeerProcess", scripted)
    monkeypatch.setattr(bench_module, "_peer_folder", lambda engine: "some/folder")
    return scripted


def test_throughput_submits_every_prompt_in_every_round_after_a_warm_up(pipe):
    done = corogen("bench", "throughput", "--num-prompts", "3", "--output-len", "4", "--repeat", "2", "--json", "-q")
    found = json.loads(done.stdout)
    assert (found["benchmark"], found["requests"], found["rounds"]) == ("throughput", 3, 2)
    assert len(pipe.asked) == 3 * (2 + 1)
    assert pipe.asked[0][1].explicit() == {"max_new_tokens": 4, "ignore_eos": False}
    assert found["tokens_per_round"] == 12
    assert found["tokens_per_piece"] == 1.0
    assert set(found["ttft_ms"]) == {"p50", "p90", "p99"}
    assert found["setting"]["versions"]["transformers"]
    assert done.stderr == ""


def test_prompts_can_be_ids_of_a_given_length(pipe):
    corogen("bench", "throughput", "--num-prompts", "2", "--input-len", "9", "--repeat", "1", "--output-len", "4")
    assert [len(prompt) for prompt, _, _ in pipe.asked] == [9, 9, 9, 9]
    assert all(token < 1000 for prompt, _, _ in pipe.asked for token in prompt)


def test_the_prefix_cache_is_on_as_by_default_unless_refused(pipe):
    corogen("bench", "latency", "--repeat", "1", "--output-len", "4")
    assert pipe.opened_with[1].enable_prefix_caching is True
    corogen("bench", "latency", "--repeat", "1", "--output-len", "4", "--no-prefix-caching")
    assert pipe.opened_with[1].enable_prefix_caching is False


def test_both_sides_warm_up_and_then_take_turns(pipe, against):
    done = corogen(
        "bench", "throughput", "--num-prompts", "2", "--output-len", "4", "--ignore-eos", "--repeat", "3",
        "--compare", "transformers", "--num-threads", "1", "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)
    # each of its runs comes after one more round of ours
    assert against.runs == [("batch", 2, 4, 2), ("batch", 2, 4, 4), ("batch", 2, 4, 6), ("batch", 2, 4, 8)]
    assert (against.folder, against.threads) == ("some/folder", 1)
    assert len(found["ratio"]["values"]) == 3
    low, high = found["ratio"]["interval_90"]
    assert found["ratio"]["min"] <= low <= found["ratio"]["median"] <= high <= found["ratio"]["max"]
    assert found["peer"]["tok_per_s"]["median"] == 16.0
    assert found["peer"]["same_token_share"] == 1.0


def test_latency_compares_one_request_with_generate(pipe, against):
    done = corogen("bench", "latency", "--output-len", "4", "--repeat", "1", "--compare", "transformers")
    assert [run[:3] for run in against.runs] == [("one", 1, 4)] * 2
    for words in ("one request alone", "ratio within a pair", "TTFT", "transformers (one)"):
        assert words in done.stdout


def test_a_peer_that_generates_too_little_is_no_comparison(pipe, against):
    against.tokens = 3
    done = corogen("bench", "latency", "--output-len", "4", "--repeat", "1", "--compare", "transformers")
    assert done.exit_code == 1
    assert "3 tokens instead of 1 times 4" in done.stderr


def test_a_comparison_in_another_precision_is_refused(pipe):
    done = corogen("bench", "latency", "--compare", "transformers", "--dtype", "bfloat16")
    assert done.exit_code == 1
    assert "float32" in done.stderr


def test_a_failed_request_fails_the_measurement(monkeypatch):
    failed = [Response(finish_reason="error", error_code="request_failed", error_message="no luck")]
    use(monkeypatch, ScriptedPipeline(failed))
    done = corogen("bench", "latency")
    assert done.exit_code == 1
    assert "no luck" in done.stderr


def test_two_sources_of_prompts_exclude_each_other(pipe, tmp_path):
    done = corogen("bench", "latency", "--input-len", "5", "--prompts", tmp_path / "p")
    assert done.exit_code == 2


def test_json_has_null_where_there_is_no_figure(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline(pieces("all at once", reason="length")))
    done = corogen("bench", "latency", "--output-len", "1", "--repeat", "1", "--json", "-q")
    assert json.loads(done.stdout, parse_constant=pytest.fail)["tpot_ms"] == {"p50": None, "p90": None, "p99": None}
    assert pipe.closed == 1


def test_a_table_without_figures_shows_dashes():
    assert tables.number(None) == tables.number(float("nan")) == "-"
    assert tables.number(1234.567, 2) == "1,234.57"


def test_kinds_of_peer_are_those_of_the_peer():
    assert peer.KINDS == ("batch", "continuous", "one")
