"""The worker's side: builds the model once, then turns the input of each batch into its output."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from corogen.errors import ConfigError
from corogen.tasks import payload
from corogen.wire.messages import StartPhase, TaskError, TaskInput, TaskOutput, TaskSpec, WorkerReady
from corogen.workers.device import choose_device


class TaskRunner:
    """One worker's model. Not thread-safe: `load`, then `run` batch after batch."""

    def __init__(self, spec: TaskSpec, on_phase: Callable[[StartPhase], None]) -> None:
        self._spec, self._on_phase = spec, on_phase
        self._device = choose_device(spec.device)
        self._model: Callable[..., Any]

    def load(self) -> WorkerReady:
        """Build the model. Raises what the user's function raises."""
        if self._spec.num_threads > 0:
            torch.set_num_threads(self._spec.num_threads)
        self._on_phase(StartPhase("build"))
        began = time.perf_counter()
        model_fn, arguments = payload.decode(self._spec.model)
        self._model = self._placed(model_fn(**arguments))
        return WorkerReady(0, 0, 0, "", str(self._device), {"build": time.perf_counter() - began})

    def _placed(self, model: Any) -> Callable[..., Any]:
        if not callable(model):
            raise ConfigError(f"model_fn must return a torch module or another callable, not {model!r}")
        return model.eval().to(self._device) if isinstance(model, nn.Module) else model

    @torch.inference_mode()
    def run(self, task: TaskInput) -> TaskOutput | TaskError:
        """The output for one batch, or what was raised on the way to it."""
        try:
            batch = payload.decode(task.body, self._device)
            return TaskOutput(task.step, payload.encode(call(self._model, batch)))
        except Exception as error:
            return TaskError(task.step, traceback.format_exc(), type(error).__name__, _pickled(error))


def call(model: Callable[..., Any], batch: Any) -> Any:
    """A tuple or list is positional arguments, a dict keywords, anything else one argument."""
    if isinstance(batch, tuple | list):
        return model(*batch)
    if isinstance(batch, dict):
        return model(**batch)
    return model(batch)


def _pickled(error: Exception) -> bytes:
    try:
        return payload.encode(error)
    except Exception:
        return b""
