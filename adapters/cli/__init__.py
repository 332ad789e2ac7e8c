"""The command line: `corogen run`, `chat`, `serve`, `batch`, `bench` and `check-env`.

It parses options and prints; what it shows comes from `corogen` and `corogen.adapters.bench`. torch is never imported
in this process, so that an answer begins as soon as the worker is ready.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading


def main() -> None:
    """The console script `corogen`. Ends with 0, 1 (an error), 2 (usage), 130 (Ctrl-C) or 141 (stdout was closed)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what a terminal's encoding does not
    try:
        from corogen.adapters.cli.app import app

        app(prog_name="corogen")
    except KeyboardInterrupt:
        _leave(130)
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))


def _leave(code: int) -> None:
    """End the process; after a failure without waiting for a thread that is in the middle of a download."""
    busy = any(not t.daemon for t in threading.enumerate() if t is not threading.main_thread())
    if code and busy:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    raise SystemExit(code)
