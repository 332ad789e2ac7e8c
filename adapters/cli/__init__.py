"""The command line: `corogen run`, `chat`, `bench` and `check-env`.

It parses options and prints; what it shows comes from `corogen` and `corogen.adapters.bench`. torch is never imported
in this process, so that an answer begins as soon as the worker is ready.
"""

from __future__ import annotations


def main() -> None:
    """The console script `corogen`. Always ends with SystemExit: 0, 1 (an error), 2 (usage), 130 (Ctrl-C)."""
    try:
        from corogen.adapters.cli.app import app

        app(prog_name="corogen")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
