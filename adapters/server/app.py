"""`make_app`: the ASGI application over a pipeline."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from corogen.adapters.server import chat, completions, errors, native
from corogen.adapters.server.auth import RequireKey
from corogen.adapters.server.limits import LimitBody, Uploads
from corogen.adapters.server.logging import RequestLog
from corogen.adapters.server.metrics import CONTENT_TYPE_LATEST
from corogen.adapters.server.replies import json_reply
from corogen.adapters.server.service import Service
from corogen.adapters.server.settings import ServerSettings

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline


def make_app(pipe: Pipeline, settings: ServerSettings | None = None) -> FastAPI:
    """The application. It neither opens nor closes `pipe`; runs on one asyncio loop, which may be any.

    Mount it into another application, or give it to an ASGI server in one process.
    """
    settings = ServerSettings() if settings is None else settings
    service = Service(pipe, settings)
    app = FastAPI(title="corogen", version=_version(), redoc_url=None)
    for router in (chat.routes(service), completions.routes(service), native.routes(service), _facts(service)):
        app.include_router(router)
    errors.install(app, settings)
    # from the inside out
    app.state.uploads = Uploads()
    app.add_middleware(LimitBody, settings=settings, uploads=app.state.uploads)
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestLog, metrics=service.metrics)
    app.add_middleware(WithoutPrefix)
    return app


class WithoutPrefix:
    """Pure ASGI middleware: the path prefix of a proxy is taken off, whether or not the proxy has done so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(f"{prefix}{prefix}/"):  # servers put it before what they receive
            scope = {**scope, "path": scope["path"].removeprefix(prefix)}
        await self._app(scope, receive, send)


def _facts(service: Service) -> APIRouter:
    """Routes that ask the engine for nothing."""
    router = APIRouter(tags=["facts"])

    @router.get("/v1/models")
    async def models() -> Response:
        """The names under which the model is served."""
        names = service.settings.served_model_names
        return json_reply({"object": "list", "data": [_model(service, name) for name in names]})

    @router.get("/v1/models/{name:path}", responses={404: {"description": "Another model's name"}})
    async def model(name: str) -> Response:
        """One of them."""
        service.check_model(name)
        return json_reply(_model(service, name))

    @router.get("/health", responses={503: {"description": "Not ready; the body says why"}})
    async def health() -> Response:
        """200 while requests are served. Never waits for the engine."""
        state = service.pulse.state(service.settings.stall_s)
        reply = json_reply({"status": state})
        reply.status_code = 200 if state == "ready" else 503
        return reply

    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/version")
    async def version() -> Response:
        """The version of corogen."""
        return json_reply({"version": _version()})

    for path, endpoint in (("/health", health), ("/v1/models", models), ("/metrics", metrics), ("/version", version)):
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return router


def _model(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "corogen",
        "root": service.name,
        "max_model_len": service.pipe.engine.admission.facts.max_len,
    }


@functools.cache
def _version() -> str:
    return importlib.metadata.version("corogen")
