"""`Pipeline`: one loaded model for callers of every kind, in any thread and on any loop."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from corogen.adapters.calls import GenConfigs, check_call
from corogen.adapters.futures import RequestFuture
from corogen.adapters.loop_thread import EngineThread
from corogen.adapters.session import ChatStream, Session
from corogen.adapters.streams import AsyncStream, Stream, collect, collect_async
from corogen.config import EngineConfig, check_config
from corogen.errors import ConfigError, InvalidRequest
from corogen.outputs import EngineStats, Response, StepRecord
from corogen.params import GenerationConfig, WhenFull
from corogen.wire.messages import StartPhase

if TYPE_CHECKING:
    from corogen.engine import Engine
    from corogen.text.tokenizer import Tokenizer
    from corogen.workers.executor import Executor

logger = logging.getLogger("corogen")

_numbers = itertools.count(1)
_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()

#: arguments of LMDeploy's pipeline() that have no counterpart -> (LMDeploy's defaults, what to do instead)
_FOREIGN: dict[str, tuple[tuple[Any, ...], str]] = {
    "chat_template_config": ((None,), "set chat_template in EngineConfig to a Jinja file or text"),
    "max_log_len": ((None,), "prompts are never logged"),
    "speculative_config": ((None,), "speculative decoding is not supported"),
    "trust_remote_code": ((None, False), "only model classes of transformers are loaded"),
}


def pipeline(
    model: str | os.PathLike[str] | None = None,
    backend_config: EngineConfig | None = None,
    *,
    log_level: str | int | None = None,
    executor: Executor | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[StartPhase], None] | None = None,
    **overrides: Any,
) -> Pipeline:
    """Load a model and return the pipeline that serves it. Make one and share it: each loads the model again.

    Args:
        model: a folder, a hub id, a `.gguf` file, or the short name `demo`. LMDeploy's name `model_path` works, too.
        backend_config: the engine's settings.
        log_level: of the logger "corogen", such as "INFO"; None: leave it alone.
        executor, tokenizer: for tests, see `corogen.testing`.
        progress: hears of the phases of the start, in the engine's thread.
        overrides: single settings of `EngineConfig`, which replace those of `backend_config`.

    Raises:
        ConfigError: everything that is wrong with the settings, before anything is loaded.
        ModelError: the model can not be found, read or served.
        WorkerStartError: a worker failed; with its traceback.
    """
    model = overrides.pop("model_path", None) if model is None else model
    config = _merged(backend_config, overrides)
    if log_level is not None:
        _set_level(log_level)
    return Pipeline(model, config, executor=executor, tokenizer=tokenizer, progress=progress)


class Pipeline:
    """One engine in a thread of its own, and every way to call it. See `pipeline` for the arguments.

    A prompt is a string, a list of messages, or a list of token ids; a list of prompts gives a list of answers in the
    same order. `gen_config` is one `GenerationConfig`, or a list of one for each prompt. `do_preprocess=False` takes a
    string as raw text, without the chat template. A single prompt raises its error; in a list the bad item becomes a
    `Response` with `finish_reason="error"` and the others are answered. With
    `when_full="wait"` requests for which there is no room (`queue_size`, `max_waiting_tokens`) wait for their turn
    instead of being refused. All methods may be called from any thread.
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
        self._name = "scripted" if model is None else str(model)
        self._number = next(_numbers)
        self._thread = EngineThread(model, backend_config, executor=executor, tokenizer=tokenizer, progress=progress)
        _warn_of_second_load(self)
        _open.add(self)

    def __repr__(self) -> str:
        return f"<Pipeline {self._number}: {self._name!r}, {'closed' if self._thread.closed else 'open'}>"

    @property
    def thread(self) -> EngineThread:
        """The engine's thread, with its `loop` and `run(coro)`."""
        return self._thread

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._thread.engine

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return self.engine.config

    # ------------------------------------------------------------------ synchronous

    def infer(
        self,
        prompts: Any,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        *,
        request_id: str | Sequence[str] | None = None,
        when_full: WhenFull = "raise",
        use_tqdm: bool = False,
    ) -> Any:
        """Answer one prompt (a `Response`) or a list of them (a list). `use_tqdm` shows a progress bar on stderr.

        Raises:
            InvalidRequest: the call or a single prompt is wrong.
            QueueFullError, RequestTimeout, WorkerError, RequestFailed: of a single prompt.
            EngineClosed: the pipeline is closed, or was closed meanwhile.
            BlockingCallError: on the engine's own loop.
        """
        call = check_call(prompts, gen_config, do_preprocess, request_id, when_full)
        with _progress_bar(len(call.prompts), use_tqdm) as on_answer:
            answers = collect(self._thread, call, on_answer)
        return answers[0] if call.single else answers

    __call__ = infer

    def stream_infer(
        self,
        prompts: Any,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        *,
        request_id: str | Sequence[str] | None = None,
        when_full: WhenFull = "raise",
    ) -> Stream:
        """Submit, and return an iterator over the pieces, those of several prompts mixed and told apart by `index`.

        Raises what `infer` raises; what is known at the call is raised by the call.
        """
        return Stream(self._thread, check_call(prompts, gen_config, do_preprocess, request_id, when_full))

    def submit(
        self,
        prompts: Any,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        *,
        request_id: str | Sequence[str] | None = None,
        when_full: WhenFull = "raise",
    ) -> RequestFuture:
        """Submit, and return a future at once: of a `Response`, or of a list of them for a list of prompts.

        Raises what is known at the call, as `infer` does; the rest is raised by the future's `result()`.
        """
        return RequestFuture(self._thread, check_call(prompts, gen_config, do_preprocess, request_id, when_full))

    # ------------------------------------------------------------------ coroutines, on any loop

    async def async_batch_infer(
        self,
        prompts: Any,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        *,
        request_id: str | Sequence[str] | None = None,
        when_full: WhenFull = "raise",
    ) -> Any:
        """`infer` for coroutines of any asyncio, uvloop or trio loop. Cancelling it aborts what still runs."""
        call = check_call(prompts, gen_config, do_preprocess, request_id, when_full)
        answers = await collect_async(self._thread, call)
        return answers[0] if call.single else answers

    def async_stream_infer(
        self,
        prompts: Any,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        *,
        request_id: str | Sequence[str] | None = None,
        when_full: WhenFull = "raise",
    ) -> AsyncStream:
        """`stream_infer` for coroutines: submits at the call; `async for` over it, best inside `async with`.

        Raises what is known at the call, as `infer` does. Long prompts and long lists are prepared in a thread, so
        that the caller's loop goes on: then errors come with the first piece.
        """
        return AsyncStream(self._thread, check_call(prompts, gen_config, do_preprocess, request_id, when_full))

    # ------------------------------------------------------------------ chats

    def session(self, messages: Sequence[dict[str, Any]] = (), gen_config: GenerationConfig | None = None) -> Session:
        """A new conversation; `messages` come first: a system message, an earlier history."""
        return Session(messages, gen_config)

    def chat(
        self,
        prompt: Any,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
    ) -> Any:
        """Answer in a conversation: a `Response`, or with `stream_response` a `ChatStream` of its pieces.

        The history grows by question and answer once the answer is complete; after an error or an abort it is what it
        was before.

        Raises:
            InvalidRequest: the session is answering another question; and what `infer` raises.
        """
        session = Session() if session is None else session
        if not isinstance(session, Session):
            raise InvalidRequest(f"session must come from Pipeline.session(), not {session!r}", param="session")
        messages = session.ask(prompt)
        try:
            stream = self.stream_infer(messages, session.gen_config if gen_config is None else gen_config)
        except BaseException:
            session.done(messages, None)
            raise
        session.abort_with(stream.close)
        pieces = ChatStream(session, messages, stream)
        return pieces if stream_response else _whole(pieces)

    # ------------------------------------------------------------------ the rest

    def abort(self, request: str | Session | None = None) -> None:
        """End a request by its id, the answer of a session, or (None) everything. Unknown ids are fine.

        Their readers get what there is, with `finish_reason="abort"`.
        """
        if isinstance(request, Session):
            request.abort()
        elif request is None or isinstance(request, str):
            for request_id in self.engine.request_ids() if request is None else [request]:
                self.engine.abort(request_id)
        else:
            raise InvalidRequest(f"abort takes a request id, a session or None, not {request!r}", param="request_id")

    def stats(self) -> EngineStats:
        """A picture of the engine at this moment."""
        return self.engine.stats()

    def step_log(self, count: int = 100) -> list[StepRecord]:
        """The last `count` steps, oldest first."""
        return self.engine.step_log(count)

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Close the engine. Who still waits gets EngineClosed.

        With `drain` running requests may finish first, for `timeout_s` at most. Idempotent. Raises BlockingCallError
        on the engine's own loop.
        """
        self._thread.close(drain=drain, timeout_s=timeout_s)
        _open.discard(self)

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """`close` for coroutines; their loop goes on meanwhile."""
        await self._thread.aclose(drain=drain, timeout_s=timeout_s)
        _open.discard(self)

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
        await self.aclose()


def _whole(pieces: ChatStream) -> Response:
    answer = Response()
    with pieces:
        for piece in pieces:
            answer.extend(piece)
    return answer


def _merged(config: EngineConfig | None, overrides: dict[str, Any]) -> EngineConfig:
    """The config with single settings replaced. Raises one ConfigError for all that is wrong."""
    problems = []
    for name in [name for name in overrides if name in _FOREIGN]:
        value, (defaults, instead) = overrides.pop(name), _FOREIGN[name]
        if value not in defaults:
            problems.append(f"{name}, an argument of LMDeploy's pipeline, is not supported: {instead}")
    config = EngineConfig() if config is None else config
    try:
        check_config(config)
        config = dataclasses.replace(config, **overrides)
        check_config(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def _set_level(level: str | int) -> None:
    try:
        logger.setLevel(level)
    except (TypeError, ValueError):
        raise ConfigError(f"log_level must be a level of logging such as 'INFO', not {level!r}") from None


def _warn_of_second_load(pipe: Pipeline) -> None:
    for other in list(_open):
        if other._name == pipe._name and pipe.engine.model is not None and not other.thread.closed:
            logger.warning(
                "%s is loaded again in this process although %r serves it: that takes its memory and start-up time "
                "twice, and requests of the two are not batched together; share one pipeline between all callers",
                pipe._name,
                other,
            )
            return


@contextlib.contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[Response], None]]:
    if not shown:
        yield lambda response: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda response: progress.advance(task)
