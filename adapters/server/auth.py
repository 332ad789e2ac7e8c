"""API keys: where they come from, and the middleware that asks for one."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from corogen.adapters.server.errors import ApiError, note_error
from corogen.errors import ConfigError

#: environment variable with keys, separated by commas
KEYS_VARIABLE = "COROGEN_API_KEYS"

#: answered without a key
OPEN_PATHS = frozenset({"/health", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})


def read_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys in `file` (one a line; `#` begins a comment) and in COROGEN_API_KEYS.

    Raises:
        ConfigError: the file can not be read, or holds no key; or a key holds what can not be sent in a header.
    """
    keys = [key.strip() for key in environment.get(KEYS_VARIABLE, "").split(",")]
    if file is not None:
        keys += _keys_in(file)
    found = tuple(dict.fromkeys(key for key in keys if key))
    if any(not key.isascii() or not key.isprintable() or " " in key for key in found):
        raise ConfigError("an API key holds a character that can not be sent in a header: use letters, digits, - and _")
    return found


def _keys_in(file: Path) -> list[str]:
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API keys can not be read from {file}: {error}") from error
    keys = [line.partition("#")[0].strip() for line in lines]
    if not any(keys):
        raise ConfigError(f"{file} holds no API key: write one a line")
    return keys


class RequireKey:
    """Pure ASGI middleware: 401 unless `Authorization: Bearer KEY` carries one of the keys.

    Every key is compared, each in constant time, so that the time of an answer says nothing about them.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or _route(scope) in OPEN_PATHS or self._allows(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong: send Authorization: Bearer KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )
        note_error(scope, error)
        await error.response()(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _route(scope: Scope) -> str:
    """The path without the prefix that a proxy or a mount put before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
