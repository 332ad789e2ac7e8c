"""Which part of a model a worker holds."""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """One of `tp * pp` workers. Ranks count the tensor-parallel neighbours of a stage first."""

    rank: int = 0
    tp: int = 1
    pp: int = 1
    #: layers of each stage; None: balanced by cost
    partition: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Workers of the group."""
        return self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        """Place among the workers that share this stage's layers."""
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        """Place in the pipeline."""
        return self.rank // self.tp

    @property
    def first(self) -> bool:
        """Whether token ids enter here."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether logits come out here."""
        return self.stage == self.pp - 1

    @property
    def samples(self) -> bool:
        """Whether this worker, alone of all, chooses the tokens."""
        return self.last and self.tp_rank == 0
