"""For all tests: what must be left as it was."""

import gc
import os
import signal
import threading
import time

import pytest

# a shell's background jobs ignore Ctrl-C, and so would every program that a test starts and interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def threads():
    return {thread for thread in threading.enumerate() if not thread.name.startswith(("pytest", "asyncio_"))}


def open_files():
    try:
        return len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        return None


def eventually(condition, seconds=5.0):
    """Whether `condition()` becomes true soon: for what another thread does at its own time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.fixture
def no_threads_left():
    """The test ends every thread that it began."""
    before = threads()
    yield
    gc.collect()
    assert eventually(lambda: not threads() - before), threads() - before
