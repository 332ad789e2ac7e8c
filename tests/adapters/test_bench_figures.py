"""Percentiles, intervals and arrival times: arithmetic against values worked out by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corogen.adapters.bench import machine, throughput, workload
from corogen.adapters.bench.figures import Timeline, bootstrap_median, percentile, spread, stream_figures, summary_ms
from corogen.errors import InvalidRequest

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def test_percentiles_interpolate_between_neighbours():
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 90) == pytest.approx(3.7)
    assert percentile(values, 100) == 4.0


def test_no_values_give_nan_and_one_value_gives_itself():
    assert math.isnan(percentile([], 50))
    assert percentile([7.0], 99) == 7.0
    assert summary_ms([0.002]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0}


@given(numbers)
def test_percentiles_rise_and_stay_within_the_values(values):
    found = [percentile(values, q) for q in (0, 10, 50, 90, 99, 100)]
    slack = 1e-6
    assert all(a <= b + slack for a, b in itertools.pairwise(found))
    assert (found[0], found[-1]) == (min(values), max(values))


def test_the_bootstrap_interval_is_repeatable_and_holds_the_median():
    values = [1.1, 1.3, 1.2, 1.25, 1.05]
    low, high = bootstrap_median(values)
    assert (low, high) == bootstrap_median(values)
    assert min(values) <= low <= 1.2 <= high <= max(values)


def test_the_interval_of_equal_values_is_that_value():
    assert bootstrap_median([2.0] * 5) == (2.0, 2.0)
    assert all(math.isnan(end) for end in bootstrap_median([]))


def test_more_values_give_a_narrower_interval():
    few, many = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0] * 30
    width = [high - low for low, high in (bootstrap_median(few), bootstrap_median(many))]
    assert width[1] < width[0]


def test_a_spread_names_the_extremes():
    found = spread([3.0, 1.0, 2.0])
    assert (found["median"], found["min"], found["max"]) == (2.0, 1.0, 3.0)
    assert found["values"] == [3.0, 1.0, 2.0]


def timeline(*pieces, submitted=10.0):
    line = Timeline(submitted)
    for at, tokens in pieces:
        line.note(submitted + at, tokens)
    return line


def test_a_stream_has_a_first_token_a_pace_and_gaps():
    line = timeline((0.5, 1), (0.7, 2), (1.1, 1))
    assert line.first == pytest.approx(0.5)
    assert line.per_token == pytest.approx(0.6 / 3)
    assert line.gaps == pytest.approx([0.2, 0.4])
    assert line.total == 4


def test_an_answer_in_one_piece_has_no_pace():
    line = timeline((0.5, 8))
    assert math.isnan(line.per_token)
    assert line.gaps == []


def test_stream_figures_leave_out_streams_without_pieces():
    found = stream_figures([timeline((0.1, 1), (0.2, 3)), timeline()])
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    assert found["tokens_per_piece"] == 2.0


def test_agreement_counts_tokens_before_the_first_difference():
    assert throughput._agreement([[1, 2, 3]], [[1, 2, 3]]) == 1.0
    assert throughput._agreement([[1, 2, 3], [1, 9, 3]], [[1, 2, 3], [1, 2, 3]]) == pytest.approx(4 / 6)
    assert throughput._agreement([], []) == 1.0


def test_prompts_come_from_text_json_and_objects_and_start_again(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('Hello\n\n"quoted"\n[5, 6]\n{"messages": [{"role": "user", "content": "m"}]}\n{"prompt": "p"}\n')
    found = workload.prompts_from(file, 6)
    user = [{"role": "user", "content": "Hello"}]
    assert found[:3] == [user, [{"role": "user", "content": "quoted"}], [5, 6]]
    assert found[3:5] == [[{"role": "user", "content": "m"}], [{"role": "user", "content": "p"}]]
    assert found[5] == user


def test_a_file_without_prompts_is_refused_by_name(tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    for name in ("empty", "missing"):
        with pytest.raises(InvalidRequest, match=name):
            workload.prompts_from(tmp_path / name, 1)


def test_random_prompts_have_the_length_and_stay_in_the_vocabulary():
    found = workload.random_prompts(3, 20, 500)
    assert [len(prompt) for prompt in found] == [20] * 3
    assert all(0 <= token < 500 for prompt in found for token in prompt)
    assert found == workload.random_prompts(3, 20, 500)
    assert found[0] != found[1]


def test_the_setting_names_versions_without_importing_torch():
    import subprocess
    import sys

    code = (
        "import sys; from corogen.adapters.bench import machine; print(machine.setting()['versions']['torch']);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != "None"


def test_cpu_seconds_of_another_process_are_seen_and_a_dead_one_has_none():
    import subprocess
    import sys

    process = subprocess.Popen(
        [sys.executable, "-c", "sum(range(5_000_000)); print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.readline()
    used = machine.cpu_seconds(process.pid)
    assert process.pid in machine.children() or not machine.children()
    process.communicate(b"\n")
    assert used is None or used > 0.01
    assert machine.cpu_seconds(process.pid) is None
