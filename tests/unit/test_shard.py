"""Which part of a model a worker holds."""

from corogen.model.shard import Shard


def test_a_worker_alone_is_first_and_last() -> None:
    assert Shard().first
    assert Shard().last


def test_only_the_ends_of_the_pipeline_are_first_and_last() -> None:
    stages = [Shard(tp_rank=1, tp=2, pp_rank=i, pp=3) for i in range(3)]
    assert [s.first for s in stages] == [True, False, False]
    assert [s.last for s in stages] == [False, False, True]
