"""One worker process: started without forking the host's threads, heard to its last word, never left behind."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import site
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from corogen.wire.channel import ChannelProtocol
from corogen.wire.messages import FromWorker, Shutdown, ToWorker
from corogen.workers.descriptors import close_in_forks, fill_standard_streams

logger = logging.getLogger("corogen.workers")

#: seconds that a worker gets to leave by itself before it is killed
EXIT_GRACE_S = 5.0
_TAIL_LINES = 30
#: seconds that a dead worker's last lines may take to come through the pipe
_LAST_WORDS_S = 1.0


class WorkerProcess:
    """A child `python -P -m corogen.workers`, joined by one end of a socket pair.

    `on_message` gets what it sends. `on_exit` is called once, with the exit code, when it is gone for whatever reason.
    Everything happens on the loop that called `start`.
    """

    def __init__(
        self, rank: int, on_message: Callable[[FromWorker], None], on_exit: Callable[[int | None], None]
    ) -> None:
        self.rank = rank
        self._on_exit = on_exit
        self._channel = ChannelProtocol(on_message, self._lost)
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._gone: asyncio.Future[int | None] | None = None
        self._silent = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._last_words: asyncio.Task[None] | None = None
        self._pipe: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._process.pid if self._process else None

    @property
    def stderr_tail(self) -> str:
        """The last lines that the worker wrote."""
        return "\n".join(self._tail)

    async def start(self) -> None:
        """Spawn and connect. Raises OSError if no process can be started."""
        loop = asyncio.get_running_loop()
        self._gone = loop.create_future()
        fill_standard_streams()
        ours, theirs = socket.socketpair()
        close_in_forks(ours)
        with theirs:
            process = self._process = _spawn(theirs.fileno())
        # a thread of its own, from the beginning: at interpreter exit no new one can be had
        threading.Thread(target=_reap, args=(process, loop, self._reaped), name="corogen-reaper", daemon=True).start()
        ours.setblocking(False)
        await loop.create_connection(lambda: self._channel, sock=ours)
        if process.stdout is not None:
            reader = _LineReader(self._heard, self._silent.set)
            self._pipe, _ = await loop.connect_read_pipe(lambda: reader, process.stdout)

    def send(self, message: ToWorker) -> None:
        """Queue one message for the worker."""
        self._channel.send(message)

    async def stop(self) -> None:
        """Ask the worker to leave, kill it if it does not, and wait until it is reaped."""
        if self._process is None or self._gone is None:
            return
        self._channel.send(Shutdown())
        self._channel.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._gone), EXIT_GRACE_S)
            return
        self.kill()
        await asyncio.shield(self._gone)

    def kill(self) -> None:
        """SIGKILL, for a worker that hangs or must not go on."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _heard(self, line: str) -> None:
        self._tail.append(line)
        logger.debug("worker %d: %s", self.rank, line)

    def _lost(self) -> None:
        """The socket is closed, so the process ends or has ended."""
        self._deadline = asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.kill)

    def _reaped(self, code: int) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._last_words = asyncio.get_running_loop().create_task(self._report(code))

    async def _report(self, code: int) -> None:
        with contextlib.suppress(asyncio.TimeoutError):  # a grandchild may hold the pipe open
            if self._pipe is not None:
                await asyncio.wait_for(self._silent.wait(), _LAST_WORDS_S)
        self._close_pipe()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(code)
            self._on_exit(code)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        elif self._process is not None and self._process.stdout is not None:  # the start was given up before
            self._process.stdout.close()


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Not asyncio's own: its child watchers belong to the main thread, or install a signal handler in the host."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "corogen.workers", str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
    )


def _reap(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, tell: Callable[[int], None]) -> None:
    """The reaper's thread: sleeps until the process is gone."""
    code = process.wait()
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
        loop.call_soon_threadsafe(tell, code)


#: how long an idle OpenMP thread spins before it sleeps. libgomp's own default burns a core's whole time slice when
#: the machine is busy; this costs nothing when it is not. Settings of the host win.
_SPIN = {"GOMP_SPINCOUNT": "2000"}


def _environment() -> dict[str, str]:
    """The host's environment, plus the folder of this package if the child could not import it by itself."""
    environment = {**({} if "OMP_WAIT_POLICY" in os.environ else _SPIN), **os.environ}
    root = str(Path(__file__).resolve().parents[2])
    if root not in map(os.path.realpath, [*site.getsitepackages(), site.getusersitepackages()]):
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        environment["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return environment


class _LineReader(asyncio.Protocol):
    """Lines of a pipe, decoded leniently; `on_end` when there are no more."""

    def __init__(self, on_line: Callable[[str], None], on_end: Callable[[], None]) -> None:
        self._on_line, self._on_end = on_line, on_end
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line.decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._on_line(self._rest.decode(errors="replace"))
        self._on_end()
