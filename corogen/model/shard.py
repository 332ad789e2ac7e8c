"""Which part of a model a worker holds, and how the workers of one stage add up their parts. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A worker's part: the layers of one pipeline stage, and of each layer one of `tp` parts."""

    tp_rank: int = 0
    tp: int = 1
    pp_rank: int = 0
    pp: int = 1
    #: layers by stage, as the user gave them; empty: balanced
    partition: tuple[int, ...] = ()

    @property
    def first(self) -> bool:
        """Whether the stage begins with the embedding."""
        return self.pp_rank == 0

    @property
    def last(self) -> bool:
        """Whether the stage ends with the head."""
        return self.pp_rank == self.pp - 1


class TensorGroup(Protocol):
    """The workers that hold the parts of one stage. Every member must make the same calls in the same order; each
    returns when its result can be used on the model's device."""

    @property
    def rank(self) -> int:
        """This member's number."""

    @property
    def size(self) -> int:
        """How many members there are."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all members, in place, and returned."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every member's tensor by rank; all of one shape and dtype."""

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """On rank 0 what `all_gather` returns, on others None."""
