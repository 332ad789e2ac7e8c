"""A step with prompts as one array of whole numbers, laid out the same on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from corogen.wire.messages import PrefillRow


class Arrays(NamedTuple):
    """What the device needs to know of a step; all int32."""

    #: [T], slots of the tokens, decode rows first; -1: padding
    slots: np.ndarray
    #: [2, T], positions (-1: a decode row) and ids of prompt tokens
    fresh: np.ndarray
    #: [n, 4], see `corogen.attention.triton_prefill`
    tiles: np.ndarray
    #: [rows], which tokens' logits are wanted
    at: np.ndarray
    #: [rows], slots that the chosen tokens belong to; -1: none
    targets: np.ndarray


class Shape(NamedTuple):
    """Sizes of the arrays. Each part begins at a multiple of 16 bytes, so that kernels are compiled once."""

    tokens: int
    tiles: int
    rows: int

    @property
    def sizes(self) -> list[int]:
        """Numbers in each part, padding included."""
        bare = [self.tokens] * 3 + [4 * self.tiles] + [self.rows] * 2
        return [-(-n // 4) * 4 for n in bare]

    @property
    def total(self) -> int:
        """Numbers in all."""
        return sum(self.sizes)

    def fits(self, arrays: Arrays) -> bool:
        """Whether the arrays can be padded to this shape."""
        return len(arrays.tiles) <= self.tiles and len(arrays.at) <= self.rows and len(arrays.slots) <= self.tokens


class Parts(NamedTuple):
    """The same on the device."""

    slots: torch.Tensor
    positions: torch.Tensor
    ids: torch.Tensor
    tiles: torch.Tensor
    at: torch.Tensor
    targets: torch.Tensor


def shape_of(arrays: Arrays) -> Shape:
    """The least shape."""
    return Shape(len(arrays.slots), len(arrays.tiles), max(1, len(arrays.at)))


def pack(arrays: Arrays, shape: Shape) -> np.ndarray:
    """One array in the layout of `shape`, padded with what computes nothing."""
    out = np.full(shape.total, -1, np.int32)
    at = np.cumsum((0, *shape.sizes))
    parts = (arrays.slots, *arrays.fresh, arrays.tiles.ravel(), arrays.at, arrays.targets)
    for start, part in zip(at, parts, strict=False):
        out[start : start + len(part)] = part
    out[at[4] + len(arrays.at) : at[5]] = 0  # logits of some token that nobody looks at
    return out


def unpack(packed: torch.Tensor, shape: Shape) -> Parts:
    """Views of the parts of `packed`, an array on the device that has at least `shape.total` numbers."""
    slots, positions, ids, tiles, at, targets = torch.split(packed[: shape.total], shape.sizes)
    t, rows = shape.tokens, shape.rows
    return Parts(slots[:t], positions[:t], ids[:t], tiles[: 4 * shape.tiles].view(-1, 4), at[:rows], targets[:rows])


def arrays_of(decode: np.ndarray, prefill: Sequence[PrefillRow], tile_tokens: int, targets: np.ndarray) -> Arrays:
    """Lay out a step: decode rows, then the tokens of the prompts' chunks."""
    columns, tiles, at = [np.stack([decode, np.full_like(decode, -1), np.zeros_like(decode)])], [], []
    first = len(decode)
    for row in prefill:
        count = len(row.token_ids)
        columns.append(np.stack([np.full(count, row.slot), row.start + np.arange(count), row.token_ids]))
        tiles.append(_tiles(row, first, tile_tokens))
        first += count
        if row.sample:
            at.append(first - 1)
    tokens = np.concatenate(columns, 1).astype(np.int32)
    tile_rows = np.concatenate(tiles).astype(np.int32) if tiles else np.zeros((0, 4), np.int32)
    return Arrays(tokens[0], tokens[1:], tile_rows, np.array([*range(len(decode)), *at], np.int32), targets)


def _tiles(row: PrefillRow, first: int, tile_tokens: int) -> np.ndarray:
    count = len(row.token_ids)
    begin = np.arange(0, count, tile_tokens)
    parts = [np.full_like(begin, row.slot), first + begin, np.minimum(count - begin, tile_tokens), row.start + begin]
    return np.stack(parts, 1)
