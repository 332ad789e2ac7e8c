"""corogen serves transformer models: coroutines inside, thin thread-safe adapters outside.

The public names are loaded when they are first used, so that `import corogen` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline, pipeline
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

__version__ = "0.1.0"

__all__ = [
    "BlockingCallError",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "CorogenError",
    "EmptyPrompt",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "GenerationConfig",
    "InvalidRequest",
    "ModelError",
    "ModelNotFound",
    "Pipeline",
    "PromptTooLong",
    "PytorchEngineConfig",
    "QueueFullError",
    "RequestAborted",
    "RequestFailed",
    "RequestTimeout",
    "Response",
    "StepFailed",
    "TokenOutOfRange",
    "TokenizerError",
    "UnsupportedFeature",
    "UnsupportedModel",
    "WorkerDied",
    "WorkerError",
    "WorkerStartError",
    "pipeline",
]

_HOME = {
    "Engine": "corogen.engine",
    "EngineConfig": "corogen.config",
    "GenerationConfig": "corogen.params",
    "Pipeline": "corogen.adapters.pipeline",
    "PytorchEngineConfig": "corogen.config",
    "Response": "corogen.outputs",
    "pipeline": "corogen.adapters.pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'corogen' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "corogen.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
