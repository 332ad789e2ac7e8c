"""Layers by pipeline stage, from a config alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corogen.errors import ConfigError
from corogen.model.partition import balanced, check_pp, stage_layers
from corogen.model.shard import Shard

#: the demo model
SMOLLM = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def stages(config: dict[str, Any], pp: int, partition: tuple[int, ...] = ()) -> list[int]:
    """Layers by stage; the ranges follow one another."""
    ranges = [stage_layers(config, Shard(pp_rank=i, pp=pp, partition=partition)) for i in range(pp)]
    assert [i for r in ranges for i in r] == list(range(sum(map(len, ranges))))
    return [len(r) for r in ranges]


def pace(sizes: tuple[int, ...], head: float) -> float:
    return max(*sizes[:-1], sizes[-1] + head) if len(sizes) > 1 else sizes[0] + head


@given(st.integers(1, 12), st.integers(1, 5), st.floats(0, 9), st.floats(0, 9))
@settings(max_examples=200, deadline=None)
def test_no_partition_has_a_quicker_slowest_stage(layers: int, pp: int, embedding: float, head: float) -> None:
    if pp > layers:
        return
    cuts = itertools.combinations(range(1, layers), pp - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *c, layers))) for c in cuts]
    found = balanced(layers, pp, embedding, head)
    assert found in every
    assert pace(found, head) == pytest.approx(min(pace(p, head) for p in every))


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"), [(12, 3, [4, 4, 4]), (10, 4, [2, 2, 3, 3]), (7, 1, [7]), (3, 3, [1] * 3)]
)
def test_without_a_vocabulary_stages_are_even(layers: int, pp: int, sizes: list[int]) -> None:
    assert sorted(stages({"n_layer": layers}, pp)) == sizes


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    assert stages(SMOLLM, 1) == [30]
    first, last = stages(SMOLLM, 2)
    assert (first, last) == (19, 11)
    # the embedding costs memory only: it is worth a layer where that slows nothing
    assert stages(SMOLLM, 3) == [12, 13, 5]


def test_a_head_larger_than_all_layers_leaves_one() -> None:
    assert stages({**SMOLLM, "num_hidden_layers": 4}, 2) == [3, 1]


def test_experts_make_layers_heavy_and_the_head_light() -> None:
    experts = {**SMOLLM, "num_local_experts": 16, "intermediate_size": 4096}
    assert stages(experts, 3) == [10, 10, 10]


def test_many_layers_and_stages_take_no_time() -> None:
    assert sum(stages({**SMOLLM, "num_hidden_layers": 200}, 8)) == 200


def test_an_explicit_partition_is_obeyed() -> None:
    assert stages(SMOLLM, 3, (1, 28, 1)) == [1, 28, 1]
    assert stages({"text_config": SMOLLM}, 2, (10, 20)) == [10, 20]


@pytest.mark.parametrize(
    ("pp", "partition", "message"),
    [
        (31, (), "pp=31 is more than the 30 layers"),
        (2, (15, 14), r"\[15, 14\] adds up to 29 layers and the model has 30"),
        (3, (15, 15), r"\[15, 15\] has 2 stages and pp is 3"),
        (2, (30, 0), r"\[30, 0\] leaves a stage without layers"),
        (2, (31, -1), "leaves a stage without layers"),
    ],
)
def test_what_can_not_be_is_refused(pp: int, partition: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pp(SMOLLM, pp, partition)
    with pytest.raises(ConfigError, match=message):
        stage_layers(SMOLLM, Shard(pp=pp, partition=partition))


def test_a_config_that_does_not_tell_its_layers_is_left_to_the_worker() -> None:
    check_pp({"model_type": "llama"}, 4)
    with pytest.raises(ConfigError, match="number of layers"):
        stage_layers({"model_type": "llama"}, Shard(pp=4))


def test_no_torch_is_imported() -> None:
    code = "import sys, corogen.model.partition; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
