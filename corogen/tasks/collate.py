"""Tensors of several tasks into those of a batch, and back. Data is a tensor, or a dict, tuple or list of data."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


def as_tensors(data: Any) -> Any:
    """`data` with tensors for arrays, numbers and lists of numbers. Raises TypeError for what has no meaning here."""
    if isinstance(data, dict):
        return {name: as_tensors(value) for name, value in data.items()}
    if isinstance(data, tuple) or (isinstance(data, list) and any(isinstance(v, Tensor | dict | tuple) for v in data)):
        return tuple(as_tensors(value) for value in data)
    return torch.as_tensor(data)


def kind(data: Any, *, skip_first: bool) -> Hashable:
    """Equal for data that can share a batch: structure, dtypes and shapes, without the first dimension if told so."""
    if isinstance(data, dict):
        return tuple((name, kind(value, skip_first=skip_first)) for name, value in data.items())
    if isinstance(data, tuple):
        return tuple(kind(value, skip_first=skip_first) for value in data)
    if skip_first and not data.dim():
        raise TypeError("a single number has no length: it can be stacked, not padded or packed")
    return data.dtype, tuple(data.shape[1:] if skip_first else data.shape)


def first_length(data: Any) -> int:
    """The first dimension of the first tensor; 1 for a number."""
    while isinstance(data, dict | tuple):
        data = next(iter(data.values() if isinstance(data, dict) else data))
    return int(data.shape[0]) if data.dim() else 1


def _each(rows: list[Any], join: Callable[[list[Tensor], str], Tensor], name: str = "") -> Any:
    """`join` over the tensors that stand at the same place; `name` is that of the dict's entry."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: _each([row[key] for row in rows], join, key) for key in first}
    if isinstance(first, tuple):
        return tuple(_each([row[i] for row in rows], join, name) for i in range(len(first)))
    return join(rows, name)


def stack(rows: list[Any]) -> Any:
    """One dimension more."""
    return _each(rows, lambda tensors, name: torch.stack(tensors))


def pack(rows: list[Any], lengths: list[int]) -> Any:
    """Joined along the first dimension; the lengths come last, or under the name "lengths"."""
    joined = _each(rows, lambda tensors, name: torch.cat(tensors))
    extra = torch.tensor(lengths)
    if isinstance(joined, dict):
        return {**joined, "lengths": extra}
    return (*joined, extra) if isinstance(joined, tuple) else (joined, extra)


def pad(rows: list[Any], lengths: list[int], value: float | dict[str, float], side: str, mask: str | None) -> Any:
    """The first dimension filled up to the longest; a dict without a mask gets one."""

    def join(tensors: list[Tensor], name: str) -> Tensor:
        fill = value.get(name, 0) if isinstance(value, dict) else value
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=side)

    padded = _each(rows, join)
    if isinstance(padded, dict) and mask is not None and mask not in padded:
        ones = [torch.ones(length, dtype=torch.long) for length in lengths]
        padded[mask] = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)
    return padded


def _parts(output: Any, take: Callable[[Any], list[Any]], count: int) -> list[Any]:
    """One value for each of `count` tasks, of the structure of `output`."""
    if isinstance(output, dict):
        columns = {name: _parts(value, take, count) for name, value in output.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
    if isinstance(output, tuple):
        return list(zip(*(_parts(value, take, count) for value in output), strict=True))
    return take(output)


def rows(output: Any, count: int) -> list[Any]:
    """Row i of every tensor or list for task i."""

    def take(value: Any) -> list[Any]:
        if len(value) != count:
            raise ValueError(f"the output has {len(value)} rows, and {count} tasks are in the batch")
        return [_own(row) for row in value]

    return _parts(output, take, count)


def unpad(output: Any, lengths: list[int], side: str) -> list[Any]:
    """The rows of each task's own tokens."""
    every = rows(output, len(lengths))
    return [_cut(row, length, side) for row, length in zip(every, lengths, strict=True)]


def _cut(row: Any, length: int, side: str) -> Any:
    if isinstance(row, dict):
        return {name: _cut(value, length, side) for name, value in row.items()}
    if isinstance(row, tuple):
        return tuple(_cut(value, length, side) for value in row)
    return _own(row[:length] if side == "right" else row[len(row) - length :])


def unpack(output: Any, lengths: list[int]) -> list[Any]:
    """The rows of each task's own tokens, of tensors [tokens, ...] or [1, tokens, ...]."""
    total = sum(lengths)

    def take(value: Tensor) -> list[Any]:
        if value.shape[0] == 1 and value.dim() > 1 and value.shape[1] == total:
            value = value[0]
        if value.shape[0] != total:
            raise ValueError(f"the output has {value.shape[0]} rows, and {total} tokens are in the batch")
        return [_own(part) for part in torch.split(value, lengths)]

    return _parts(output, take, len(lengths))


def _own(row: Any) -> Any:
    """In memory of its own, so that one result does not hold those of the whole batch."""
    return row.clone() if isinstance(row, Tensor) else row
