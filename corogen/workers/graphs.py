"""CUDA graphs of one computation at several sizes."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Outcome(NamedTuple):
    """Logits [n, vocabulary] and the best id of each row [n], both valid until the next step."""

    logits: torch.Tensor
    ids: torch.Tensor


class GraphLadder:
    """The smallest captured size that is large enough is replayed.

    Everything is captured on one stream into one pool of memory, largest first, so that all sizes share the memory
    of the largest: results of one replay are overwritten by the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: list[int] = []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Outcome]] = {}

    def capture(self, sizes: Sequence[int], body: Callable[[int], Outcome]) -> None:
        """Capture `body(size)` for every size. It must read and write fixed tensors, and never wait for the device.

        Raises:
            RuntimeError: the computation can not be captured.
        """
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for size in sorted(sizes, reverse=True):
                body(size)  # kernels are compiled and libraries set up outside of the capture
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    logits, ids = body(size)
                finally:
                    graph.capture_end()
                self._graphs[size] = graph, Outcome(_alias(logits), ids)
                del logits
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._sizes = sorted(sizes)

    def fit(self, count: int) -> int | None:
        """The size that a batch of `count` is padded to, if there is one."""
        at = bisect.bisect_left(self._sizes, count)
        return self._sizes[at] if at < len(self._sizes) else None

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


def ladder(largest: int) -> list[int]:
    """Batch sizes up to `largest`: powers of two, then steps of at most a third."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, largest + 1, 64)
    return sorted({s for s in sizes if s < largest} | {largest})
