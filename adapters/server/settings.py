"""`ServerSettings`: what the HTTP side may be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP server; those of the engine stand in `EngineConfig`."""

    #: names under which clients may ask for the model; answers carry the first
    served_model_names: tuple[str, ...] = ("corogen",)
    #: any of them opens every route; none: no key is asked for
    api_keys: tuple[str, ...] = ()
    #: origins of web pages that may call this server from a browser; "*" for all
    cors_origins: tuple[str, ...] = ()
    #: larger request bodies are refused with 413
    max_body_bytes: int = 16 * 2**20
    #: seconds without any part of a body after which its request is given up with 408
    body_timeout_s: float = 60.0
    #: status of an answer to a request that finds the queue full
    overload_status: int = 429
    #: what `Retry-After` says then
    retry_after_s: int = 1
    #: seconds without news after which a stream carries a comment, so that proxies keep it open
    keep_alive_s: float = 15.0
    #: seconds that the engine's loop may be deaf before /health says so
    stall_s: float = 30.0
    #: choices (prompts times n) of one request
    max_choices: int = 4096
