"""One call with one prompt or many: its arguments checked, its requests submitted, its answers put together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corogen.admission import is_batch
from corogen.errors import CorogenError, EngineClosed, InvalidRequest
from corogen.outputs import Response
from corogen.params import GenerationConfig, WhenFull, may_wait
from corogen.stream import Outgoing, Outlet

if TYPE_CHECKING:
    from corogen.engine import Engine

#: prompts in one call from which on a thread prepares them, so that the caller's event loop goes on
MANY_PROMPTS = 64

#: one config for all prompts, or one for each
GenConfigs = GenerationConfig | Sequence[GenerationConfig | None] | None


@dataclass(frozen=True, slots=True)
class Call:
    """The checked arguments of one call. `single`: one prompt, so one answer is returned or one error raised."""

    prompts: Sequence[Any]
    configs: Sequence[GenerationConfig | None]
    request_ids: Sequence[str | None]
    single: bool
    do_preprocess: bool
    #: without room the requests wait for their turn
    wait: bool

    def is_long(self, engine: Engine) -> bool:
        """Whether preparing it would hold up an event loop."""
        return len(self.prompts) > MANY_PROMPTS or any(map(engine.admission.is_long, self.prompts))


def check_call(
    prompts: Any,
    gen_config: GenConfigs,
    do_preprocess: bool,
    request_id: str | Sequence[str] | None,
    when_full: WhenFull = "raise",
) -> Call:
    """Find what is wrong with the call as a whole, before any work.

    Raises:
        InvalidRequest: a type or a length is wrong.
    """
    single = not is_batch(prompts)
    prompts = [prompts] if single else list(prompts)
    if type(do_preprocess) is not bool:
        raise InvalidRequest(f"do_preprocess must be True or False, not {do_preprocess!r}", param="do_preprocess")
    configs = _one_each(gen_config, GenerationConfig, "gen_config", len(prompts))
    if isinstance(request_id, str) and not single:
        raise InvalidRequest("request_id must be a list of ids, one for each prompt", param="request_id")
    ids = _one_each(request_id, str, "request_id", len(prompts))
    return Call(prompts, configs, ids, single, do_preprocess, may_wait(when_full))


def _one_each(value: Any, kind: type, name: str, count: int) -> Sequence[Any]:
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, list | tuple):
        raise InvalidRequest(
            f"{name} must be a {kind.__name__}, or a list of one for each prompt, not {value!r}", param=name
        )
    if len(value) != count:
        raise InvalidRequest(
            f"{name} is a list of {len(value)} for {count} prompt{'s' * (count != 1)}: give one for all of them, or "
            f"a list of {count}",
            param=name,
        )
    for position, item in enumerate(value):
        if item is not None and not isinstance(item, kind):
            raise InvalidRequest(f"{name}[{position}] must be a {kind.__name__} or None, not {item!r}", param=name)
    return list(value)


class Batch:
    """The requests of one call on their way.

    `listener` gets each `Outgoing` that has news, in the consumer's context; the consumer hands every such item to
    `receive`, until `open` is 0. The engine reaches `listener` and never this object.
    """

    __slots__ = ("_call", "_engine", "_left", "_listener", "_outlet", "_outs", "_pieces", "open")

    def __init__(
        self, engine: Engine, call: Call, outlet: Outlet, listener: Callable[[Any], None], *, pieces: bool
    ) -> None:
        self._engine, self._call, self._outlet, self._listener = engine, call, outlet, listener
        self._pieces = pieces
        self._outs: list[Outgoing] = []
        self._left = False
        #: requests whose end has not been received
        self.open = len(call.prompts)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that were submitted so far."""
        return [out.request_id for out in self._outs]

    # ------------------------------------------------------------------ submitting, from any thread

    def submit(self, put: Callable[[Any], None]) -> None:
        """Check and queue everything. `put` gets the error items of a list.

        Raises:
            CorogenError: of a single prompt; of a list only EngineClosed. Then nothing is left behind.
        """
        try:
            self._engine.check_open()
            for index in range(len(self._call.prompts)):
                if self._left:
                    break
                self._submit_one(index, put)
        except BaseException:
            self.abort()
            raise

    def submit_in_pool(self, put: Callable[[Any], None]) -> None:
        """The same in a thread of the engine's pool; `put` also gets the exception, if there is one.

        Raises:
            EngineClosed: the engine is closed.
        """

        def job() -> None:
            try:
                self.submit(put)
            except BaseException as error:
                deliver(error)

        def deliver(error: BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the consumer's loop is closed
                put(error)

        def settled(future: Any) -> None:
            if future.cancelled():
                deliver(EngineClosed("the engine is closed"))

        self._engine.check_open()
        self._engine.text_pool.submit(job).add_done_callback(settled)

    def _submit_one(self, index: int, put: Callable[[Any], None]) -> None:
        call, engine = self._call, self._engine
        try:
            request = engine.prepare(
                call.prompts[index],
                call.configs[index],
                do_preprocess=call.do_preprocess,
                request_id=call.request_ids[index],
            )
            out = Outgoing(self._outlet, pieces=self._pieces, index=index, request_id=request.id)
            out.listener = self._listener
            engine.submit(request, out, wait=call.wait)
        except CorogenError as error:
            if call.single or isinstance(error, EngineClosed):
                raise
            put(Response.from_error(error, index=index))
            return
        self._outs.append(out)
        if self._left:  # the consumer left while a thread of the pool was here
            engine.abort(out.request_id)

    def abort(self) -> None:
        """End every request that still runs. From any thread, any number of times."""
        self._left = True
        for out in list(self._outs):
            if not out.ended:
                self._engine.abort(out.request_id)

    # ------------------------------------------------------------------ receiving, in the consumer's context

    def receive(self, item: Any) -> Response | None:
        """What an item holds: a piece, an answer, the error item of a list, or nothing yet.

        Raises:
            CorogenError: the error of a single request, or what ended all of them.
        """
        if isinstance(item, Outgoing):
            return self._take(item)
        if isinstance(item, Response):
            self.open -= 1
            return item
        self.open = 0
        raise item

    def _take(self, out: Outgoing) -> Response | None:
        try:
            piece = out.take()
        except Exception as error:
            if self._call.single or isinstance(error, EngineClosed):
                self.open = 0
                raise
            piece = Response.from_error(error, index=out.index)
        if out.finished:
            self.open -= piece is not None
        elif out.ended:
            self._listener(out)  # the last text was taken; the error that ended it comes next
        return piece
