"""Every error that corogen raises on purpose.

::

    CorogenError
    ├── ConfigError               everything that is wrong with a config, at once
    ├── InvalidRequest            the caller's request can not be right
    │   ├── PromptTooLong
    │   ├── EmptyPrompt
    │   ├── TokenOutOfRange
    │   ├── ChatTemplateError
    │   └── UnsupportedFeature
    ├── ModelError                the model can not be used
    │   ├── ModelNotFound
    │   ├── CheckpointError
    │   ├── TokenizerError
    │   └── UnsupportedModel
    ├── QueueFullError            too much is outstanding; try again later
    ├── RequestTimeout            the request's own deadline has passed
    ├── RequestAborted            somebody aborted the request
    ├── RequestFailed             the request failed inside the engine
    ├── EngineClosed              the engine is closed, or closed while the request ran
    ├── BlockingCallError         a blocking call on the loop that would have to answer it
    └── WorkerError
        ├── WorkerStartError
        ├── WorkerDied
        └── StepFailed

Each class has a `code`, the stable word that `Response.error_code` and the HTTP envelope carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def a_type_of(value: object) -> str:
    """The type of `value` with its article, for messages: "an int", "a str"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


class CorogenError(Exception):
    """Root of the tree."""

    code = "internal_error"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its state: constructors take other arguments than the message that they build."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[CorogenError], args: tuple[Any, ...], state: dict[str, Any]) -> CorogenError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(CorogenError, ValueError):
    """A configuration that can not work. `problems` lists every fault that was found, one sentence each."""

    code = "invalid_config"

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        head = "the configuration can not be used:"
        super().__init__(self.problems[0] if len(self.problems) == 1 else "\n  - ".join([head, *self.problems]))


class InvalidRequest(CorogenError, ValueError):
    """The request can never be served as it stands. `param` names the argument or field at fault, if there is one."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a single new token. Carries both numbers."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int, *, what: str = "context") -> None:
        self.num_tokens, self.limit = num_tokens, limit
        super().__init__(
            f"the prompt has {num_tokens} tokens and the {what} holds {limit}, of which one must stay free "
            f"for the answer: shorten the prompt to {limit - 1} tokens or fewer",
            param="prompt",
        )


class EmptyPrompt(InvalidRequest):
    """There is nothing to continue: no token, no message."""

    code = "empty_prompt"


class TokenOutOfRange(InvalidRequest):
    """A token id that the model has no embedding for."""

    code = "token_out_of_range"


class ChatTemplateError(InvalidRequest):
    """The model has no chat template, or its template refused the messages."""

    code = "chat_template_error"


class UnsupportedFeature(InvalidRequest):
    """A known setting that this version does not implement; it is refused, never ignored."""

    code = "unsupported_feature"


class ModelError(CorogenError):
    """The model can not be loaded or served."""

    code = "model_error"


class ModelNotFound(ModelError):
    """No such folder, file, short name or hub id."""

    code = "model_not_found"


class CheckpointError(ModelError):
    """A weight file is missing, truncated, a pointer instead of the file, or does not fit the model."""

    code = "checkpoint_error"


class TokenizerError(ModelError):
    """The model has no tokenizer that can be read."""

    code = "tokenizer_error"


class UnsupportedModel(ModelError):
    """An architecture, layer type or option of a model that can not be served correctly."""

    code = "unsupported_model"


class QueueFullError(CorogenError):
    """As much is outstanding as `queue_size` or `max_waiting_tokens` allow; nothing was queued. Carries all four."""

    code = "queue_full"

    def __init__(
        self, outstanding: int, limit: int, waiting_tokens: int = 0, token_limit: int = 0, message: str | None = None
    ) -> None:
        self.outstanding, self.limit = outstanding, limit
        self.waiting_tokens, self.token_limit = waiting_tokens, token_limit
        super().__init__(
            message
            or f"{outstanding} requests are outstanding (queue_size {limit or 'unlimited'}) and {waiting_tokens} "
            f"prompt tokens wait (max_waiting_tokens {token_limit or 'unlimited'}): wait for some to finish, pass "
            'when_full="wait", or raise the limit'
        )


class RequestTimeout(CorogenError, TimeoutError):
    """The request's own deadline has passed."""

    code = "timeout"


class RequestAborted(CorogenError):
    """The request was aborted by its id, or its session or pipeline was told to stop it."""

    code = "aborted"


class RequestFailed(CorogenError):
    """The request failed inside the engine; the cause is chained or named in the message."""

    code = "request_failed"


class EngineClosed(CorogenError, RuntimeError):
    """The engine was closed before it could answer."""

    code = "engine_closed"


class BlockingCallError(CorogenError, RuntimeError):
    """A blocking call was made on the engine's own loop, where it could only wait for itself."""

    code = "blocking_call"


class WorkerError(CorogenError):
    """Something is wrong with a worker process."""

    code = "worker_error"


class WorkerStartError(WorkerError):
    """A worker did not become ready; the message holds that worker's own traceback."""

    code = "worker_start_failed"


class WorkerDied(WorkerError):
    """A worker ended while it was needed. Carries `rank`, `exit_code` and the last lines it wrote to stderr."""

    code = "worker_died"

    def __init__(self, rank: int, exit_code: int | None, stderr_tail: str = "") -> None:
        self.rank, self.exit_code, self.stderr_tail = rank, exit_code, stderr_tail
        how = f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
        tail = f"; its last words:\n{stderr_tail}" if stderr_tail.strip() else ""
        super().__init__(f"worker {rank} ended with {how} while requests were running{tail}")


class StepFailed(WorkerError):
    """A worker raised while it computed a step; the message holds its traceback."""

    code = "step_failed"
