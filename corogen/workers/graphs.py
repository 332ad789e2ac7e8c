"""CUDA graphs of one computation at several sizes."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

#: steps with more tokens keep the device busy without a graph
MAX_CAPTURED_TOKENS = 8192


class Outcome(NamedTuple):
    """Logits [n, vocabulary] and the best id of each row [n], both valid until the next step."""

    logits: torch.Tensor
    ids: torch.Tensor


class GraphPool:
    """Captures on one stream into one pool of memory, which all graphs share: a replay overwrites what the one before
    it gave. The largest graph must be captured first, or each larger one takes more memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], Outcome]) -> tuple[torch.cuda.CUDAGraph, Outcome]:
        """Record what `body` does. It must read and write fixed tensors, and never wait for the device.

        Raises:
            RuntimeError: it can not be captured.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            body()  # kernels are compiled and libraries set up outside of the capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits, ids = body()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, Outcome(_alias(logits), ids)


class GraphLadder:
    """Graphs of one computation at several sizes; the smallest that is large enough is replayed."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Outcome]] = {}

    def capture(self, sizes: Sequence[int], pool: GraphPool, body: Callable[[int], Outcome]) -> None:
        """Capture `body(size)` for every size, largest first. Raises RuntimeError if that can not be done."""
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = pool.capture(functools.partial(body, size))
        self._sizes = sorted(sizes)

    def fit(self, count: int) -> int | None:
        """The size that a batch of `count` is padded to, if there is one."""
        at = bisect.bisect_left(self._sizes, count)
        if at == len(self._sizes) or self._sizes[at] - count > self._most_padding(count):
            return None
        return self._sizes[at]

    def _most_padding(self, count: int) -> int:
        """Large batches keep the device busy without a graph, so that padding would cost more than it saves."""
        return count // 16 if count > 2048 else 2048

    def replay(self, size: int) -> Outcome:
        """Queue the graph of a size that `fit` gave."""
        graph, outcome = self._graphs[size]
        graph.replay()
        return outcome


class _Memory:
    """Memory of a graph's pool, as another tensor can be made of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        shape = (tensor.shape[0], tensor.shape[1] * tensor.element_size())
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same matrix without a claim on its memory, so that the pool may use it for other graphs too."""
    if not tensor.is_contiguous():
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


def batch_sizes(largest: int) -> list[int]:
    """Sizes of decode batches up to `largest`: powers of two, then steps of at most a third."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, largest + 1, 64)
    return sorted({s for s in sizes if s < largest} | {largest})


def token_counts(largest: int) -> list[int]:
    """Sizes of steps with prompts, in tokens."""
    sizes = [16, 32, 64, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256)]
    sizes += range(3072, MAX_CAPTURED_TOKENS + 1, 1024)
    return [s for s in sizes if s <= largest]
