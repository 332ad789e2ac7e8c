"""`corogen serve`: a model behind OpenAI's API."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corogen.adapters.cli.console import needing, say
from corogen.adapters.cli.options import EngineOptions, OutputOptions
from corogen.adapters.cli.serving import open_pipeline
from corogen.errors import ConfigError

if TYPE_CHECKING:
    from corogen.adapters.server import ServerSettings

_ANYWHERE = ("0.0.0.0", "::", "")


def _status(value: int) -> int:
    if not 400 <= value <= 599:
        raise typer.BadParameter(f"{value} is not a status of an error: 400 to 599")
    return value


@dataclass(frozen=True)
class ServerOptions:
    """Where and how it is served."""

    host: Annotated[
        str, typer.Option("--host", "--server-name", help="Address; 0.0.0.0 for every one that the machine has.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", "--server-port", min=0, max=65535, help="0: a free one.")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", "--model-name", help="Name for clients; may be repeated: the others too."),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys, one a line; COROGEN_API_KEYS (with commas) adds to them.")
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate chain, for TLS.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key.")] = None
    root_path: Annotated[str, typer.Option(help="The path prefix that a proxy in front takes off.")] = ""
    cors_origins: Annotated[
        list[str] | None,
        typer.Option("--cors-origins", "--allow-origins", help='Web pages that may call; may be repeated; "*": all.'),
    ] = None
    max_body_mb: Annotated[float, typer.Option(help="Larger request bodies get 413.", min=0.001)] = 16.0
    overload_status: Annotated[
        int, typer.Option(help="When the queue is full; 406 for clients of EnergonAI.", callback=_status)
    ] = 429
    queue_size: Annotated[
        int, typer.Option(help="Requests that run or wait at once; more get 429. 0: no bound.", min=0)
    ] = 1024
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests may take to finish at the end.", min=0)
    ] = 30.0
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON.")] = False

    def settings(self, model: str) -> ServerSettings:
        """What the application is told.

        Raises:
            ConfigError: the keys can not be read.
        """
        from corogen.adapters.server import ServerSettings
        from corogen.adapters.server.auth import read_keys

        return ServerSettings(
            served_model_names=tuple(self.served_model_name or [public_name(model)]),
            api_keys=read_keys(self.api_key_file),
            cors_origins=tuple(self.cors_origins or ()),
            max_body_bytes=int(self.max_body_mb * 2**20),
            overload_status=self.overload_status,
        )

    @property
    def prefix(self) -> str:
        """The path prefix as servers want it: "" or "/one/two". Raises ConfigError."""
        inner = self.root_path.strip("/")
        if not inner.isascii() or any(mark in inner for mark in " ?#%") or not inner.isprintable():
            raise ConfigError(f"--root-path {self.root_path!r} is no path prefix such as /llm")
        return f"/{inner}" if inner else ""

    @property
    def certificate(self) -> tuple[Path, Path] | None:
        """Both files, or None without TLS. Raises ConfigError for one without the other, or a missing file."""
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise ConfigError("TLS needs both --ssl-certfile and --ssl-keyfile")
        for file in (self.ssl_certfile, self.ssl_keyfile):
            if not file.is_file():
                raise ConfigError(f"there is no file {file}")
        return self.ssl_certfile, self.ssl_keyfile


def public_name(model: str) -> str:
    """A folder's or file's own name: clients need not know where it lies."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def serve(model: str, *, engine: EngineOptions, server: ServerOptions, output: OutputOptions) -> None:
    """Take the port, load the model, then serve until Ctrl-C or SIGTERM."""
    with needing("serve"):
        from corogen.adapters.server import make_app
        from corogen.adapters.server.lifecycle import serve as run
        from corogen.adapters.server.lifecycle import take_port
        from corogen.adapters.server.logging import JsonFormatter
    settings, certificate = server.settings(model), server.certificate
    if server.log_json:
        for handler in logging.getLogger("corogen").handlers:
            handler.setFormatter(JsonFormatter())
    tell = (lambda line: None) if output.quiet else say
    with take_port(server.host, server.port) as sock:
        pipe, _ = open_pipeline(model, engine.config(queue_size=server.queue_size), quiet=output.quiet)
        with pipe:
            greeting = _greeting(sock.getsockname(), settings, certificate is not None)
            run(
                make_app(pipe, settings),
                pipe,
                sock,
                drain_s=server.shutdown_timeout,
                certificate=certificate,
                root_path=server.prefix,
                ready=lambda: tell(greeting),
                say=tell,
            )
    tell("closed")


def _greeting(address: tuple[str, int], settings: ServerSettings, tls: bool) -> str:
    host, port = address[:2]
    shown = f"[{host}]" if ":" in host else host
    lines = [
        f"serving {settings.served_model_names[0]} on {'https' if tls else 'http'}://{shown}:{port} "
        "(OpenAI API under /v1, schema at /docs)"
    ]
    if host in _ANYWHERE and not settings.api_keys:
        lines.append("everybody who can reach this machine may use it: COROGEN_API_KEYS or --api-key-file sets keys")
    return "\n".join(lines)
