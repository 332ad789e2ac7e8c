"""corogen serves transformer models from Python: coroutines inside, thin thread-safe adapters outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corogen.adapters.loop_thread import EngineThread
    from corogen.adapters.pipeline import Pipeline, pipeline
    from corogen.adapters.queues import QueueAdapter
    from corogen.adapters.tasks import AsyncEngine, launch_engine
    from corogen.config import EngineConfig, PytorchEngineConfig
    from corogen.engine import Engine
    from corogen.errors import (
        BlockingCallError,
        ChatTemplateError,
        CheckpointError,
        ConfigError,
        CorogenError,
        EmptyPrompt,
        EngineClosed,
        InvalidRequest,
        ModelError,
        ModelNotFound,
        PromptTooLong,
        QueueFullError,
        RequestAborted,
        RequestFailed,
        RequestTimeout,
        StepFailed,
        TokenizerError,
        TokenOutOfRange,
        UnsupportedFeature,
        UnsupportedModel,
        WorkerDied,
        WorkerError,
        WorkerStartError,
    )
    from corogen.outputs import Response
    from corogen.params import GenerationConfig
    from corogen.tasks.batching import BatchManager, SubmitEntry, TaskEntry
    from corogen.tasks.dynamic import DynamicBatchManager

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "BatchManager",
    "BlockingCallError",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "CorogenError",
    "DynamicBatchManager",
    "EmptyPrompt",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineThread",
    "GenerationConfig",
    "InvalidRequest",
    "ModelError",
    "ModelNotFound",
    "Pipeline",
    "PromptTooLong",
    "PytorchEngineConfig",
    "QueueAdapter",
    "QueueFullError",
    "RequestAborted",
    "RequestFailed",
    "RequestTimeout",
    "Response",
    "StepFailed",
    "SubmitEntry",
    "TaskEntry",
    "TokenOutOfRange",
    "TokenizerError",
    "UnsupportedFeature",
    "UnsupportedModel",
    "WorkerDied",
    "WorkerError",
    "WorkerStartError",
    "__version__",
    "launch_engine",
    "pipeline",
]

_HOME = {
    "AsyncEngine": "adapters.tasks",
    "BatchManager": "tasks.batching",
    "DynamicBatchManager": "tasks.dynamic",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineThread": "adapters.loop_thread",
    "GenerationConfig": "params",
    "Pipeline": "adapters.pipeline",
    "PytorchEngineConfig": "config",
    "QueueAdapter": "adapters.queues",
    "Response": "outputs",
    "SubmitEntry": "tasks.batching",
    "TaskEntry": "tasks.batching",
    "launch_engine": "adapters.tasks",
    "pipeline": "adapters.pipeline",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import corogen` costs next to nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"corogen.{_HOME.get(name, 'errors')}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
