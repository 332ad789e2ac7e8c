"""The pool of KV blocks: who uses which, which are kept as cache, which hold nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class BlockCounts(NamedTuple):
    """`free + cached + used` is the size of the pool, always."""

    free: int
    cached: int
    used: int


class BlockPool:
    """Reference-counted blocks of the KV cache.

    A block that nobody refers to any more is *blank* or, if its contents were registered under a hash, *cached*:
    still available, and handed out again by `share` on a hit. Cached blocks are evicted least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # insertion order is the order of release: oldest first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._blank) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        """Blank, cached and used blocks."""
        return BlockCounts(len(self._blank), len(self._cached), self.num_blocks - self.available)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has compared with `available` before."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            del self._block_of[self._hash_of.pop(block)]
        self._refs[block] = 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, given in order of position.

        The last block goes first, so that of two cached blocks of one prompt the beginning is evicted later.
        """
        for block in reversed(list(blocks)):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def lookup(self, key: bytes) -> int | None:
        """The block registered under `key`, without taking a reference."""
        return self._block_of.get(key)

    def is_idle(self, block: int) -> bool:
        """Whether nobody refers to the block, so that sharing it takes one from `available`."""
        return self._refs[block] == 0

    def share(self, block: int) -> None:
        """Take a reference to a block that `lookup` returned."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def register(self, block: int, key: bytes) -> None:
        """The block is full and computed: later prompts may find it under `key`. The first block under a key stays."""
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    def forget_contents(self) -> None:
        """The device lost everything: no block can be hit any more."""
        self._blank.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()

    def check(self) -> None:
        """Raise RuntimeError unless every block is in exactly one place."""
        used = [b for b, refs in enumerate(self._refs) if refs > 0]
        places = [*used, *self._blank, *self._cached]
        if sorted(places) != list(range(self.num_blocks)) or min(self._refs, default=0) < 0:
            raise RuntimeError(f"the block pool is damaged: {self.counts}, {len(set(places))} distinct blocks")
        if any(self._block_of.get(key) != block for block, key in self._hash_of.items()):
            raise RuntimeError("the block pool's prefix index is damaged")
