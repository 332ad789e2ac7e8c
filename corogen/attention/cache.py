"""The paged KV cache and how large it may be."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from corogen.attention.probe import LayerFacts
from corogen.errors import ConfigError

#: a CPU shares its memory with everything else: no cache takes more than this by default
MAX_CPU_CACHE_BYTES = 4 << 30


class KVCache:
    """Keys and values of every layer, [kv_heads, num_blocks, block_size, dim] each, all zero at first.

    Heads come first so that the gathered blocks of many rows are the operand of one batched product as they are.
    """

    def __init__(
        self,
        layers: Sequence[LayerFacts],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks, block_size)
        self._keys = [_zeros((f.kv_heads, *shape, f.key_dim), dtype, device) for f in layers]
        self._values = [_zeros((f.kv_heads, *shape, f.value_dim), dtype, device) for f in layers]
        heads = max((f.kv_heads for f in layers), default=0)
        self._head_starts = torch.arange(heads, device=device)[:, None] * num_blocks

    def write(self, layer: int, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [1, Hkv, T, D] at `places` [T], each block * block_size + offset."""
        for store, new in ((self._keys[layer], k), (self._values[layer], v)):
            store.view(store.shape[0], -1, store.shape[3]).index_copy_(1, places, new[0])

    def gather(self, layer: int, blocks: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hkv, rows, keys, D], contiguous, of the blocks [rows * blocks a row]."""
        heads = self._keys[layer].shape[0]
        places = (self._head_starts[:heads] + blocks).view(-1)
        keys, values = (self._gather(s, places, rows) for s in (self._keys[layer], self._values[layer]))
        return keys, values

    def _gather(self, store: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
        heads, num_blocks, _, dim = store.shape
        return store.view(heads * num_blocks, -1).index_select(0, places).view(heads, rows, -1, dim)


class TokenMajorCache:
    """Keys and values of every layer, [num_blocks, block_size, kv_heads, dim] each: what kernels that follow block
    tables themselves read, and what a step's keys can be written to without being turned around."""

    def __init__(
        self,
        layers: Sequence[LayerFacts],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks, block_size)
        self.keys = [torch.zeros((*shape, f.kv_heads, f.key_dim), dtype=dtype, device=device) for f in layers]
        self.values = [torch.zeros((*shape, f.kv_heads, f.value_dim), dtype=dtype, device=device) for f in layers]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU their pages take no memory before they are written (torch.zeros would touch them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def block_bytes(layers: Sequence[LayerFacts], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(f.kv_heads * (f.key_dim + f.value_dim) for f in layers) * block_size * dtype.itemsize


def choose_num_blocks(
    bytes_per_block: int,
    block_size: int,
    device: torch.device,
    fraction: float,
    max_slots: int,
    max_len: int,
    reserve: int = 0,
) -> int:
    """How many blocks the memory allows: `fraction` of what is free now, and all but `reserve` bytes at most.

    On a CPU never more than what `max_slots` sequences of `max_len` tokens need, nor than 4 GiB.

    Raises:
        ConfigError: not a single block fits.
    """
    if device.type == "cuda":
        free, what = torch.cuda.mem_get_info(device)[0], "GPU memory"
        budget = max(0, min(int(free * fraction), free - reserve))
        count = budget // bytes_per_block
    else:
        free, what = available_memory(), "memory"
        budget = min(int(free * fraction), MAX_CPU_CACHE_BYTES)
        count = min(budget // bytes_per_block, max_slots * -(-max_len // block_size))
    if count < 1:
        raise ConfigError(
            f"no KV block fits: one takes {bytes_per_block / 2**20:.1f} MiB and the cache may take "
            f"{budget / 2**20:.1f} MiB of {free / 2**20:.0f} MiB of free {what}; raise cache_max_entry_count, "
            "lower block_size, or use a smaller model"
        )
    return count


def available_memory() -> int:
    """Bytes this process may still take: what the system has available, within the limit of its control group."""
    limits = [_system_available(), *_cgroup_room()]
    return max(0, min(limits))


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


#: (limit, usage, statistics, key of the page cache that can be given back), for control groups of version 2 and 1
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def _cgroup_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What each limit on the way from the root to our own control group leaves."""
    folders = [root]
    for part in _own_cgroup(own).parts[1:]:
        folders.append(folders[-1] / part)
    found = (_room(folder, *names) for folder in folders for names in _CGROUPS)
    return [room for room in found if room is not None]


def _own_cgroup(own: Path) -> PurePosixPath:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    return next((PurePosixPath(line[3:]) for line in lines if line.startswith("0::/")), PurePosixPath("/"))


def _room(folder: Path, limit_name: str, usage_name: str, stat_name: str, key: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        stats = dict(line.split() for line in (folder / stat_name).read_text().splitlines())
        return int(limit) - int((folder / usage_name).read_text()) + int(stats.get(key, 0))
    except (OSError, ValueError):
        return None
