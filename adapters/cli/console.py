"""What goes to stderr: start-up phases, progress, logs, and errors in one line. stdout is for results alone."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from corogen.adapters.cli.options import OutputOptions
from corogen.errors import ConfigError, CorogenError

if TYPE_CHECKING:
    from corogen.wire.messages import StartPhase

logger = logging.getLogger("corogen.cli")

_IMPORTED_AT = time.monotonic()

#: a progress report with a total above this counts bytes
_BYTES_FROM = 100_000

INTERRUPTED = 130
_BROKEN_PIPE = 141


def say(line: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def guarded(output: OutputOptions) -> Iterator[None]:
    """Run a command's body: its errors become one message and an exit code.

    1 for a CorogenError, 130 after Ctrl-C, 141 when whoever read stdout is gone. Anything else is a bug and shows
    its traceback.
    """
    _set_up_logging(output.log_level)
    try:
        yield
        sys.stdout.flush()
    except CorogenError as error:
        if output.debug:
            traceback.print_exc()
        say(f"corogen: {error or type(error).__name__}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        if output.debug:
            traceback.print_exc()
        say("\nstopped" if sys.stderr.isatty() else "stopped")  # a terminal shows ^C, in the middle of a line
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _drop_stdout()
        raise SystemExit(_BROKEN_PIPE) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _drop_stdout()
        say(f"corogen: {error.strerror}")
        raise SystemExit(1) from None


def _drop_stdout() -> None:
    """What is still in its buffer must not fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Run what needs packages of an extra; a missing one becomes a ConfigError that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("corogen"):
            raise
        raise ConfigError(f"this needs {error.name}: pip install 'corogen[{extra}]'") from error


def _set_up_logging(level: str) -> None:
    logger = logging.getLogger("corogen")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


def process_age() -> float:
    """Seconds since this process was started; since this module was imported where /proc does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, AttributeError):
        return time.monotonic() - _IMPORTED_AT


class StartupView:
    """Shows start-up phases while the engine is made: bars on a terminal, one short line elsewhere.

    A context manager, and the callable that `progress=` takes; called from the engine's thread. `seconds` holds how
    long each phase took.
    """

    def __init__(self, model: str, *, quiet: bool = False) -> None:
        self._model, self._quiet = model, quiet
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}
        self._phase = ""
        self._since = time.monotonic()
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> StartupView:
        self._since = time.monotonic()
        if self._quiet:
            return self
        if not sys.stderr.isatty():
            say(f"loading {self._model} ...")
            return self
        self._progress = _bars()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_phase("")
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, phase: StartPhase) -> None:
        """The engine enters a phase, or is further in it."""
        if phase.name != self._phase:
            logger.debug("start-up: %s", phase.name)
            self._close_phase(phase.name)
        if self._progress is None:
            return
        task = self._tasks.get(phase.name)
        if task is None:
            task = self._tasks[phase.name] = self._progress.add_task(phase.words, total=None, amount="")
        total = phase.total or None
        self._progress.update(task, completed=phase.done, total=total, amount=_amount(phase.done, phase.total))

    def _close_phase(self, entered: str) -> None:
        now = time.monotonic()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
            task = self._tasks.get(self._phase)
            if self._progress is not None and task is not None:
                self._progress.update(task, total=1, completed=1)
        self._phase, self._since = entered, now


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description:<32}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=5,
    )


def _amount(done: int, total: int) -> str:
    if not total:
        return ""
    if total < _BYTES_FROM:
        return f"{done}/{total}"
    return f"{done / 1e6:.0f}/{total / 1e6:.0f} MB"
