"""Request bodies: from JSON to checked fields; large ones in a thread, so that health, streams and others go on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from corogen.adapters.server.errors import from_validation, to_api_error
from corogen.adapters.server.parsing import parse
from corogen.adapters.server.settings import ServerSettings
from corogen.engine import Engine
from corogen.errors import CorogenError

#: bytes from which on a body is worth a thread
LARGE = 2**16


def json_route(engine: Engine) -> type[APIRoute]:
    """The class of routes whose bodies are read here. Large ones go through the engine's few threads for text."""

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            model = self.body_field.field_info.annotation

            async def handle_read(request: Request) -> Response:
                return await handle(JsonRequest(request, model, engine))

            return handle_read

    return JsonRoute


class JsonRequest(Request):
    """A request whose `json` is its checked body already, which FastAPI takes as it is."""

    def __init__(self, request: Request, model: Any, engine: Engine) -> None:
        super().__init__(request.scope, request.receive)
        self._model, self._engine = model, engine

    async def json(self) -> BaseModel:
        """The body. Raises ApiError."""
        data = await self.body()
        read = functools.partial(read_body, data, self._model)
        if len(data) < LARGE:
            return read()
        try:
            return await self._engine.text_pool.run(read)
        except CorogenError as error:  # FastAPI knows no such errors where it reads a body
            raise to_api_error(error, ServerSettings()) from error


def read_body(data: bytes, model: type[BaseModel]) -> BaseModel:
    """Parse and check. Raises ApiError, without the values at fault, which may be a prompt."""
    try:
        return model.model_validate(parse(data))
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None
