"""Running the application under uvicorn: a port taken early, signals, and an end that loses no answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from corogen.adapters.server.limits import Uploads
from corogen.errors import ConfigError, EngineClosed

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

_BACKLOG = 2048

#: seconds beyond the drain for clients that are slow to read their last answer
_GRACE_S = 3

#: seconds for the last words of answers that a second signal has ended
_LAST_WORDS_S = 0.5


def take_port(host: str, port: int) -> socket.socket:
    """Bind the address before a model is loaded for minutes. Nobody can connect until it is served.

    Raises:
        ConfigError: naming the address, if it is taken, not ours or no address.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"can not serve on {host}:{port}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"can not serve on {host}:{port}: {error.strerror or error}; choose another port") from error
    return sock


class Server(uvicorn.Server):
    """uvicorn, with an end of our own.

    The first SIGTERM or Ctrl-C: no new connection, no new request; what runs may finish, for `drain_s` at most, after
    which it gets an error. A second one ends everything now. Who is still sending a request, or does not read an
    answer, is not waited for.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        pipe: Pipeline,
        uploads: Uploads,
        *,
        drain_s: float,
        ready: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._pipe, self._uploads = pipe, uploads
        self._drain_s, self._ready, self._say = drain_s, ready, say
        self._leave = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Only in the main thread, only while serving."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begin to end; called again: end now. On the server's loop."""
        if not self.should_exit:
            self.should_exit = True
            self._say("closing: running requests may finish; Ctrl-C again ends them now")
            self._leave.set()
        elif not self.force_exit:
            self.force_exit = True
            with contextlib.suppress(EngineClosed):
                self._pipe.abort(None)

    async def main_loop(self) -> None:
        """Connections are taken: sleep until it is time to leave."""
        self._ready()
        await self._leave.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting; drain the engine beside; then close."""
        self._uploads.close()
        drain = asyncio.ensure_future(self._pipe.aclose(drain=True, timeout_s=self._drain_s))
        patience = asyncio.get_running_loop().call_later(self._drain_s + _GRACE_S, self._cut)
        await super().shutdown(sockets)
        await drain
        patience.cancel()
        await self._settle()

    async def _settle(self) -> None:
        """After a second signal: give answers a moment to say how they ended."""
        for _ in range(2):
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS_S)
            self._cut()

    def _cut(self) -> None:
        """Leave clients that do not read: what waits for them ends as if they had gone."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(
    app: FastAPI,
    pipe: Pipeline,
    sock: socket.socket,
    *,
    drain_s: float = 30.0,
    certificate: tuple[Path, Path] | None = None,
    root_path: str = "",
    ready: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, in the main thread; `pipe` is closed at the end.

    Args:
        app: made by `make_app`.
        sock: bound, see `take_port`.
        drain_s: how long running requests may take to finish at the end.
        certificate: files with certificate chain and key, for TLS.
        root_path: the path prefix that a proxy in front takes off.
        ready: called once connections are taken.
        say: hears of the steps of the end.
    """
    tls: dict[str, Any] = {}
    if certificate is not None:
        tls = {"ssl_certfile": str(certificate[0]), "ssl_keyfile": str(certificate[1])}
    config = uvicorn.Config(
        app,
        loop="uvloop",
        lifespan="off",
        access_log=False,
        log_config=None,
        date_header=False,
        server_header=False,
        backlog=_BACKLOG,
        root_path=root_path,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(drain_s) + 2 * _GRACE_S,
        **tls,
    )

    async def live() -> None:
        await Server(config, pipe, app.state.uploads, drain_s=drain_s, ready=ready, say=say).serve(sockets=[sock])

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(live())
