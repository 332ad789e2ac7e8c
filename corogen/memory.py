"""Memory that a closed engine's process still holds."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def give_back() -> None:
    """Let the C library return freed memory to the system, which glibc's does only when it is told to."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
