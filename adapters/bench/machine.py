"""What a measurement ran on, and what processes and threads have used."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from corogen.workers.cpus import usable_cpus

PACKAGES = ("corogen", "torch", "transformers", "tokenizers", "uvloop", "safetensors", "huggingface-hub")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed versions by package; None for one that is missing. Imports nothing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_limit() -> int | None:
    """Bytes that this process may use: the cgroup's limit or the machine's memory; None if neither is known."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def setting(**details: Any) -> dict[str, Any]:
    """Versions, processor and threads, to stand beside a measurement."""
    return {
        "versions": versions(),
        "cpu": cpu_model(),
        "cpus_usable": usable_cpus(),
        "platform": platform.platform(),
        "load_average": load_average(),
        **details,
    }


def load_average() -> float | None:
    """Processes that wanted to run over the last minute, ours included; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def cpu_seconds(pid: int | None = None) -> float | None:
    """CPU time of a process (None: this one) and its threads; None if it is gone or the system does not tell."""
    if pid is None or pid == os.getpid():
        return time.process_time()
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux's number for the CPU clock of another process
    except OSError:
        return None


def children() -> dict[int, str]:
    """Child processes of this one: pid to name. Empty where /proc is missing."""
    found = {}
    own = str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        if fields[1] == own and fields[0] != "Z":
            found[int(stat.parent.name)] = name
    return found


def rss_bytes(pid: int | None = None) -> int | None:
    """Resident memory of a process (None: this one); None if it is gone or /proc is missing."""
    try:
        pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int | None:
    """Open descriptors of this process; None where /proc is missing."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def voluntary_switches(native_id: int) -> int | None:
    """Times that a thread of this process has gone to sleep; None where /proc is missing."""
    try:
        lines = Path(f"/proc/self/task/{native_id}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches")), None)
