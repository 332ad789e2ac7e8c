"""The HTTP server: OpenAI's API, and a few routes of its own, over one `Pipeline`.

`make_app(pipe, settings)` is an ASGI application for any server; `corogen serve` runs it under uvicorn. Needs the
extra `serve`.
"""

from __future__ import annotations

from corogen.adapters.server.app import make_app
from corogen.adapters.server.settings import ServerSettings

__all__ = ["ServerSettings", "make_app"]
