"""Everything that crosses a thread, a loop, or a terminal. Thin: what is decided is decided in the engine.

`Pipeline` for callers of every kind, `EngineThread` below it, `QueueAdapter` for applications built on queues.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corogen.adapters.futures import RequestFuture
    from corogen.adapters.loop_thread import EngineThread
    from corogen.adapters.pipeline import Pipeline
    from corogen.adapters.queues import QueueAdapter
    from corogen.adapters.session import ChatStream, Session
    from corogen.adapters.streams import AsyncStream, Stream

__all__ = [
    "AsyncStream",
    "ChatStream",
    "EngineThread",
    "Pipeline",
    "QueueAdapter",
    "RequestFuture",
    "Session",
    "Stream",
]

_HOME = {
    "AsyncStream": "streams",
    "ChatStream": "session",
    "EngineThread": "loop_thread",
    "Pipeline": "pipeline",
    "QueueAdapter": "queues",
    "RequestFuture": "futures",
    "Session": "session",
    "Stream": "streams",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'corogen.adapters' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"corogen.adapters.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
