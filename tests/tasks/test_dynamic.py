"""Dynamic batching: what shares a batch, and that nobody can tell from the results."""

import time
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corogen.errors import ConfigError, RequestFailed
from corogen.tasks.batching import SubmitEntry, TaskEntry
from corogen.tasks.dynamic import DynamicBatchManager
from tests.tasks.helpers import close_gate, open_gate, scripted


def queue(*data):
    return deque(SubmitEntry(i, d) for i, d in enumerate(data))


def batches(manager, q):
    found = []
    while q:
        before = len(q)
        entry, info = manager.make_batch(q)
        assert before - len(q) == len(entry.uids) > 0
        found.append((entry, info))
    return found


def uids(manager, *data):
    return [entry.uids for entry, _ in batches(manager, queue(*data))]


def test_stacked_tasks_have_one_shape():
    data = [torch.zeros(3), torch.ones(4), torch.ones(3), [1.0, 2.0, 3.0], np.ones(3, dtype=np.float32)]
    found = batches(DynamicBatchManager(), queue(*data))
    assert [entry.uids for entry, _ in found] == [(0, 2, 3, 4), (1,)]
    assert found[0][0].batch.tolist() == [[0, 0, 0], [1, 1, 1], [1, 2, 3], [1, 1, 1]]


def test_sizes_are_bounded_and_order_is_kept():
    assert uids(DynamicBatchManager(2), *[torch.zeros(1)] * 5) == [(0, 1), (2, 3), (4,)]


def test_token_budgets_count_padding():
    lengths = [3, 1, 9, 2, 1]
    data = [torch.zeros(n) for n in lengths]
    assert uids(DynamicBatchManager(mode="pad", max_tokens=9), *data) == [(0, 1, 3), (2,), (4,)]
    assert uids(DynamicBatchManager(mode="pack", max_tokens=7), *data) == [(0, 1, 3, 4), (2,)]


def test_buckets_keep_lengths_apart():
    data = [torch.zeros(n) for n in (3, 17, 4, 100, 16, 20)]
    assert uids(DynamicBatchManager(mode="pad", buckets=[4, 16, 64]), *data) == [(0, 2), (1, 5), (3,), (4,)]


def test_the_oldest_task_is_always_in_the_next_batch():
    manager = DynamicBatchManager(4, mode="pad", buckets=[10])
    q = queue(torch.zeros(50), *[torch.zeros(2)] * 20)
    assert manager.make_batch(q)[0].uids == (0,)
    assert [entry.uid for entry in q] == list(range(1, 21))


def test_padding_adds_a_mask_and_values_by_name():
    manager = DynamicBatchManager(mode="pad", pad_side="left", pad_value={"input_ids": 9})
    data = [{"input_ids": [1, 2, 3], "types": [1, 1, 1]}, {"input_ids": [4], "types": [1]}]
    entry, _ = manager.make_batch(queue(*data))
    assert {name: value.tolist() for name, value in entry.batch.items()} == {
        "input_ids": [[1, 2, 3], [9, 9, 4]],
        "types": [[1, 1, 1], [0, 0, 1]],
        "attention_mask": [[1, 1, 1], [0, 0, 1]],
    }


def test_packing_tells_the_lengths():
    entry, _ = DynamicBatchManager(mode="pack").make_batch(queue([1, 2], [3]))
    assert [value.tolist() for value in entry.batch] == [[1, 2, 3], [2, 1]]
    entry, _ = DynamicBatchManager(mode="pack").make_batch(queue({"x": [1]}, {"x": [2, 3]}))
    assert {name: value.tolist() for name, value in entry.batch.items()} == {"x": [1, 2, 3], "lengths": [1, 2]}


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    mode=st.sampled_from(["pad-right", "pad-left", "pack"]),
    max_tokens=st.integers(0, 30),
    buckets=st.lists(st.integers(1, 12), max_size=3),
)
def test_every_task_gets_its_own_tokens_back(lengths, mode, max_tokens, buckets):
    mode, _, side = mode.partition("-")
    manager = DynamicBatchManager(
        5, mode=mode, pad_side=side or "right", max_tokens=max_tokens, buckets=buckets, per_token=True
    )
    data = [torch.arange(n) + 100 * i for i, n in enumerate(lengths)]
    results = {}
    for entry, info in batches(manager, queue(*data)):
        sizes = [lengths[uid] for uid in entry.uids]
        tokens = max(sizes) * len(sizes) if mode == "pad" else sum(sizes)
        assert len(sizes) == 1 or not max_tokens or tokens <= max_tokens
        x = entry.batch[0] if mode == "pack" else entry.batch
        output = {"double": 2 * x, "pair": (x, x + 1)}
        results |= dict(manager.split_batch(TaskEntry(entry.uids, output), **info))
    assert set(results) == set(range(len(lengths)))
    for uid, result in results.items():
        assert torch.equal(result["double"], 2 * data[uid])
        assert torch.equal(result["pair"][1], data[uid] + 1)


def test_outputs_with_a_row_for_each_task():
    manager = DynamicBatchManager(mode="pack")
    entry, info = manager.make_batch(queue([1, 2], [3]))
    output = {"pooled": torch.eye(2), "labels": ["a", "b"]}
    found = dict(manager.split_batch(TaskEntry(entry.uids, output), **info))
    assert found[1]["labels"] == "b"
    assert found[1]["pooled"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="3 rows, and 2 tasks"):
        list(manager.split_batch(TaskEntry(entry.uids, torch.eye(3)), **info))


def test_a_result_does_not_hold_the_whole_batch():
    manager = DynamicBatchManager()
    entry, info = manager.make_batch(queue(*[torch.zeros(1000)] * 8))
    results = dict(manager.split_batch(TaskEntry(entry.uids, torch.zeros(8, 1000)), **info))
    assert all(result.untyped_storage().nbytes() == 4000 for result in results.values())


@pytest.mark.parametrize("mode", ["stack", "pad", "pack"])
def test_data_that_is_wrong_fails_alone(mode):
    def model(x, *lengths):
        return x

    with scripted(model, DynamicBatchManager(mode=mode, per_token=mode != "stack")) as engine:
        close_gate(engine)
        data = [[1, 2], "text", {"x": object()}, [3, 4], [[1], [2, 3]]]
        handles = [engine.submit(i, d) for i, d in enumerate(data)]
        open_gate(engine)
        found = [handle.exception() or handle.result().tolist() for handle in handles]
        assert [found[0], found[3]] == [[1, 2], [3, 4]]
        assert all(isinstance(found[i], RequestFailed) for i in (1, 2, 4))


def test_a_batch_waits_for_others_but_not_for_long():
    with scripted(lambda x: x, DynamicBatchManager(4, max_wait_s=0.1)) as engine:
        began = time.monotonic()
        assert engine.submit(0, 1).result().item() == 1
        assert 0.1 <= time.monotonic() - began < 5
        engine.executor.inputs.clear()
        handles = [engine.submit(i, i) for i in range(4)]
        assert [h.result().item() for h in handles] == [0, 1, 2, 3]
        assert [len(x) for x in engine.executor.inputs] == [4]


def test_a_full_budget_does_not_wait():
    manager = DynamicBatchManager(4, max_wait_s=60, max_tokens=5, mode="pack")
    assert manager.hold(queue([1, 2])) > 50
    assert manager.hold(queue([1, 2], [3, 4, 5])) == 0


def test_a_length_may_be_told():
    manager = DynamicBatchManager(mode="pad", max_tokens=4, length=lambda data: 2)
    assert uids(manager, *[torch.zeros(5)] * 3) == [(0, 1), (2,)]


def test_settings_that_can_not_work_are_named():
    with pytest.raises(ConfigError) as caught:
        DynamicBatchManager(0, max_wait_s=-1, mode="x", pad_side="y")
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="per_token"):
        DynamicBatchManager(per_token=True)
