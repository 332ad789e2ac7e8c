"""Answers as `concurrent.futures.Future`, for callers that collect results later."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from corogen.adapters.calls import Call
from corogen.engine import Engine
from corogen.outputs import Response
from corogen.stream import Outgoing, Outlet


class ResponseFuture(Future[Response]):
    """The answer to one prompt. `cancel()` works at any time before the end, and aborts the request.

    Callbacks added with `add_done_callback` run in the engine's thread: they must be short and never block.
    """

    def __init__(self, engine: Engine, request_id: str) -> None:
        super().__init__()
        self._engine = engine
        self.request_id = request_id

    def cancel(self) -> bool:
        """Cancel and abort the request; False if the answer is there already."""
        cancelled = super().cancel()
        if cancelled:
            self._engine.abort(self.request_id)
        return cancelled


def submit(engine: Engine, call: Call, outlet: Outlet) -> ResponseFuture:
    """Submit the one prompt of `call`; raises at once what is wrong with it."""
    item = call.items[0]
    request = engine.prepare(item.prompt, item.gen_config, do_preprocess=call.do_preprocess)
    out = Outgoing(outlet, pieces=False, request_id=request.id)
    future = ResponseFuture(engine, request.id)
    out.listener = lambda: _resolve(future, out)
    engine.submit(request, out)
    return future


def _resolve(future: ResponseFuture, out: Outgoing) -> None:
    with suppress(InvalidStateError):  # it was cancelled
        try:
            answer = out.take()
        except Exception as error:
            future.set_exception(error)
        else:
            if answer is not None:
                future.set_result(answer)
