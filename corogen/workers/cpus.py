"""How many CPUs this process may really use, and how much memory."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus() -> int:
    """CPUs by affinity, bounded by the cgroup's quota; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def _cgroup_quota() -> float | None:
    """CPUs that the cgroup grants (version 2, then 1), or None without a bound."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        root = Path("/sys/fs/cgroup/cpu")
        micros = int((root / "cpu.cfs_quota_us").read_text())
        return None if micros <= 0 else micros / int((root / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
