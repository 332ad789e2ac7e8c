"""`Pipeline`: one model, called from anywhere."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from corogen.adapters.calls import AsyncStream, SyncStream, make_call, refuse_to_block
from corogen.adapters.futures import ResponseFuture, submit
from corogen.adapters.loop_thread import EngineThread
from corogen.adapters.portal import Portal
from corogen.adapters.session import Session, SessionStream
from corogen.config import EngineConfig, check_config
from corogen.engine import Engine
from corogen.errors import ConfigError, InvalidRequest
from corogen.outputs import EngineStats, Response, StepRecord
from corogen.params import GenerationConfig
from corogen.text.tokenizer import Tokenizer
from corogen.wire.messages import StartPhase
from corogen.workers.executor import Executor

logger = logging.getLogger("corogen")

#: arguments of LMDeploy's `pipeline` that have another name or no meaning here
_FOREIGN_ARGUMENTS = {
    "chat_template_config": "put a Jinja file or text into EngineConfig(chat_template=...)",
    "speculative_config": "speculative decoding is not supported",
    "trust_remote_code": "code from a model's repository is never run",
    "max_log_len": "prompts are never logged",
    "allowed_media_domains": "only text models are supported",
}

_open_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def pipeline(
    model_path: str | os.PathLike[str],
    backend_config: EngineConfig | None = None,
    *,
    log_level: str | None = None,
    progress: Callable[[StartPhase], None] | None = None,
    **options: Any,
) -> Pipeline:
    """Load a model and return it ready to be called. Blocks until it is loaded.

    Args:
        model_path: a folder, a hub id, a `.gguf` file, or the short name `demo`.
        backend_config: the engine's settings.
        log_level: level of the `corogen` logger, such as "INFO"; None leaves it alone.
        progress: hears of each start-up phase, on the engine's thread.
        options: single fields of EngineConfig, over those of `backend_config`.

    Raises:
        ConfigError: everything that is wrong with the settings, at once; before anything is loaded.
        ModelError: the model can not be found, read or served.
    """
    if log_level is not None:
        logging.getLogger("corogen").setLevel(log_level)
    return Pipeline(model_path, backend_config=_merge(backend_config, options), progress=progress)


def _merge(config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    foreign = [f"{name}: {_FOREIGN_ARGUMENTS[name]}" for name in options if name in _FOREIGN_ARGUMENTS]
    if foreign:
        raise ConfigError(foreign)
    if config is None:
        return EngineConfig(**options)
    check_config(config)
    return replace(config, **options) if options else config


class Pipeline:
    """One model behind an engine thread. Every method may be called from any thread, inside or outside of a loop.

    ::

        pipe = pipeline("demo")
        pipe.infer("Hakuna Matata").text
        await pipe.async_batch_infer("Hakuna Matata")
        for piece in pipe.stream_infer("..."): ...
        async for piece in pipe.async_stream_infer("..."): ...
        pipe.submit("...")          # a Future
        pipe.close()                # or `with`, or `async with`

    A prompt is a string (one user message where the model has a chat template, else raw text; always raw with
    `do_preprocess=False`), a list of messages (a chat), or a list of token ids. A list of those is a batch: results
    come back in its order, and a prompt that can not be answered becomes `Response(finish_reason="error", ...)` in
    its place. A single prompt raises. `gen_config` is one config, or a list as long as the batch.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        backend_config: EngineConfig | None = None,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        progress: Callable[[StartPhase], None] | None = None,
    ) -> None:
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        _warn_of_second_load(name)
        self.thread = EngineThread(
            name, backend_config, executor=executor, tokenizer=tokenizer, progress=progress
        )
        self._portal = Portal(self.engine)
        self._closing = threading.Lock()
        _open_pipelines.add(self)

    @property
    def engine(self) -> Engine:
        """The engine; its coroutines belong to `thread.loop`."""
        return self.thread.engine

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return self.engine.config

    # ------------------------------------------------------------------ sync

    def infer(
        self, prompts: Any, gen_config: Any = None, do_preprocess: bool = True, *, use_tqdm: bool = False
    ) -> Any:
        """The whole answer to one prompt, or the list of answers to a batch. Blocks.

        Raises:
            InvalidRequest: a single prompt, or the call itself, can not be right.
            QueueFullError, EngineClosed, WorkerError: see `corogen.errors`.
            BlockingCallError: called on the engine's own loop.
        """
        call = make_call(prompts, gen_config, do_preprocess)
        answers: dict[int, Response] = {}
        with SyncStream(self.engine, call, self._portal.direct(), pieces=False) as stream:
            for answer in _with_progress(stream, len(call.items)) if use_tqdm else stream:
                answers[answer.index] = answer
        return answers[0] if call.single else [answers[i] for i in range(len(call.items))]

    __call__ = infer

    def stream_infer(self, prompts: Any, gen_config: Any = None, do_preprocess: bool = True) -> SyncStream:
        """Pieces of one or many answers as they come; those of a batch are told apart by `.index`.

        Everything is checked and submitted at the call. Leaving the loop cancels what still runs.
        """
        call = make_call(prompts, gen_config, do_preprocess)
        return SyncStream(self.engine, call, self._portal.direct())

    def submit(
        self, prompt: Any, gen_config: GenerationConfig | None = None, do_preprocess: bool = True
    ) -> ResponseFuture:
        """Submit one prompt and return a `concurrent.futures.Future` of its response. Never blocks."""
        call = make_call(prompt, gen_config, do_preprocess)
        if not call.single:
            raise InvalidRequest("submit takes one prompt: call it once for each", param="prompt")
        return submit(self.engine, call, self._portal.direct())

    # ------------------------------------------------------------------ async, on any loop

    async def async_batch_infer(self, prompts: Any, gen_config: Any = None, do_preprocess: bool = True) -> Any:
        """The whole answer to one prompt, or the list of answers to a batch; from asyncio, uvloop or trio.

        Cancelling the caller aborts what still runs. Raises what `infer` raises.
        """
        answers: dict[int, Response] = {}
        call = make_call(prompts, gen_config, do_preprocess)
        async with AsyncStream(self.engine, call, *self._portal.here(), pieces=False) as stream:
            async for answer in stream:
                answers[answer.index] = answer
        return answers[0] if call.single else [answers[i] for i in range(len(call.items))]

    def async_stream_infer(self, prompts: Any, gen_config: Any = None, do_preprocess: bool = True) -> AsyncStream:
        """Pieces of one or many answers as they come; see `stream_infer`. Called inside a running loop."""
        call = make_call(prompts, gen_config, do_preprocess)
        return AsyncStream(self.engine, call, *self._portal.here())

    # ------------------------------------------------------------------ conversations

    def session(self, gen_config: GenerationConfig | None = None) -> Session:
        """A new conversation for `chat`."""
        return Session(gen_config)

    def chat(
        self,
        prompt: str,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: bool = False,
    ) -> Any:
        """Answer one turn of a conversation.

        Returns the session, whose `response` is the answer; with `stream_response=True` an iterator of its pieces.
        """
        session = session or self.session()
        messages = session.begin(prompt)
        try:
            session.stream = self.stream_infer(messages, gen_config or session.gen_config)
        except BaseException:
            session.finish(messages, None)
            raise
        pieces = SessionStream(session, messages, session.stream)
        if stream_response:
            return pieces
        with pieces:
            for _ in pieces:
                pass
        return session

    # ------------------------------------------------------------------ the rest

    def abort(self, target: str | Session | None = None) -> None:
        """Abort a request by its id, the running turn of a session, or (None) everything. Safe at any time."""
        if target is None:
            ids = self.engine.request_ids()
        elif isinstance(target, Session):
            ids = target.stream.request_ids if target.stream is not None else []
        else:
            ids = [target]
        for request_id in ids:
            self.engine.abort(request_id)

    def stats(self) -> EngineStats:
        """A picture of the engine at this moment."""
        return self.engine.stats()

    def step_log(self, count: int = 100) -> list[StepRecord]:
        """The last `count` steps, oldest first."""
        return self.engine.step_log(count)

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Close the engine and free everything. Waiters get EngineClosed, or their answers with `drain`. Idempotent."""
        refuse_to_block(self.engine, "await Engine.aclose()")
        with self._closing:
            self.thread.close(drain=drain, timeout_s=timeout_s)
        _open_pipelines.discard(self)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import anyio.to_thread

        await anyio.to_thread.run_sync(self.close, abandon_on_cancel=True)


def _warn_of_second_load(model: str | None) -> None:
    if model is not None and any(pipe.engine.model == model for pipe in list(_open_pipelines)):
        logger.warning(
            "%s is loaded in this process already: a second pipeline holds its weights and its KV cache again, and "
            "both compete for the same cores. One pipeline serves any number of threads and loops",
            model,
        )


def _with_progress(stream: SyncStream, total: int) -> Any:
    from rich.progress import track

    return track(stream, description="answering", total=total)
