"""The measurements that need an engine, over scripted answers: every caller, both bridges, idle phases, steps."""

import pytest

from corogen.adapters.bench import callers
from corogen.adapters.bench.steps import Mark, measure, step_cost
from corogen.adapters.cli import bench as bench_module
from corogen.adapters.pipeline import Pipeline
from corogen.config import EngineConfig
from corogen.errors import ConfigError
from corogen.testing import FakeExecutor
from corogen.testing.tokenizers import byte_level_tokenizer
from corogen.text.tokenizer import Tokenizer
from tests.adapters.cli_helpers import corogen

PROMPTS = [[5 + i] * 4 for i in range(6)]


@pytest.fixture
def pipe():
    executor = FakeExecutor(lambda prompt: [40 + prompt[0]], step_time_s=0.001)
    tokenizer = Tokenizer(byte_level_tokenizer())
    with Pipeline(backend_config=EngineConfig(max_batch_size=4), executor=executor, tokenizer=tokenizer) as pipe:
        yield pipe


def test_every_kind_of_caller_answers_all_requests(pipe):
    said = []
    found = callers.measure(pipe, PROMPTS, output_len=5, pairs=2, idle_s=0, say=said.append)
    assert [one["caller"] for one in found["callers"]] == [
        "gather",
        "threads",
        "futures",
        "queue adapter",
        "polling bridge",
    ]
    assert all(one["tok_per_s"] * one["wall_s"] == pytest.approx(30) for one in found["callers"])
    assert [one["itl_ms"] is not None for one in found["callers"]] == [True, True, False, False, False]
    assert (found["pairs"], found["idle"]) == (2, [])
    assert len(said) == 6


def test_an_idle_pipeline_does_not_wake_its_thread_while_the_polling_bridge_burns_a_core(pipe):
    found = callers.measure(pipe, PROMPTS, output_len=2, idle_s=0.3)
    ours, polling = found["idle"]
    assert (ours["open"], polling["open"]) == ("queue adapter", "polling bridge")
    assert ours["engine_thread_switches"] in (0, None)
    assert ours["process_cpu_s"] < 0.05
    assert polling["process_cpu_s"] > 0.05


def test_an_error_in_place_of_an_answer_is_raised(pipe):
    with pytest.raises(Exception, match="context"):
        callers.measure(pipe, [[5] * 5000], output_len=2, idle_s=0)


def test_the_callers_table_shows_them_all(pipe, capsys):
    found = callers.measure(pipe, PROMPTS, output_len=2, repeat=2, idle_s=0.01)
    from corogen.adapters.bench import machine
    from corogen.adapters.cli import tables

    tables.show("callers", {"model": "scripted", **found, "setting": machine.setting()})
    shown = capsys.readouterr().out
    for words in ("gather", "threads", "futures", "queue", "polling", "nothing to do"):
        assert words in shown
    assert bench_module.callers


def test_steps_measures_the_engine_thread_and_reaches_the_scripted_rate():
    cost = measure(streams=8, step_time_s=0.004, new_tokens=20)
    assert 5 < cost.steps < 20
    assert 0 < cost.engine_ms_per_step < 4
    assert 0.5 < cost.rate_share < 1.2
    assert cost.tokens_per_piece >= 1


def test_steps_as_a_command():
    done = corogen("bench", "steps", "--streams", "4", "--step-ms", "1", "--output-len", "30")
    assert done.exit_code == 0, done.stderr
    assert "4 streams" in done.stdout
    assert "share of the scripted step rate" in done.stdout


def test_a_cost_counts_full_steps_and_leaves_out_the_scripted_device():
    marks = [Mark(0, 0.0, 0.0, 0.5), Mark(2, 1.0, 10.0, 0.5), Mark(2, 2.0, 12.0, 0.5), Mark(2, 3.0, 14.0, 0.5)]
    cost = step_cost(marks, streams=2, step_time_s=0.5, consumer_ms_per_step=0.0, tokens_per_piece=1.0, tokenizer="")
    assert (cost.steps, cost.engine_ms_per_step, cost.device_ms_per_step) == (2, 1500.0, 500.0)
    assert cost.rate_share == 0.5


def test_too_few_full_steps_are_no_measurement():
    with pytest.raises(ConfigError, match="output length"):
        step_cost([], streams=2, step_time_s=0.5)
