"""Engines for measurements of faults: one without a model, whose answers follow from the prompt; or a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from corogen.adapters.bench.killer import Killer
from corogen.config import EngineConfig
from corogen.testing import FakeExecutor

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

#: the model's name that means: none
SCRIPTED = "scripted"

_NUM_BLOCKS = 8192

#: opens the same pipeline anew each time that it is called
Opener = Callable[[], contextlib.AbstractContextManager[tuple["Pipeline", Killer]]]


@contextlib.contextmanager
def scripted(config: EngineConfig, *, step_time_s: float = 0.001) -> Iterator[tuple[Pipeline, Killer]]:
    """A pipeline that answers every prompt with itself, again and again, one token each `step_time_s`."""
    from corogen.adapters.pipeline import Pipeline
    from corogen.testing.tokenizers import byte_level_tokenizer
    from corogen.text.tokenizer import Tokenizer

    executor = Killer(FakeExecutor(lambda prompt: prompt * 100, step_time_s=step_time_s, num_blocks=_NUM_BLOCKS))
    tokenizer = Tokenizer(byte_level_tokenizer(words=()))
    with Pipeline(backend_config=config, executor=executor, tokenizer=tokenizer) as pipe:
        yield pipe, executor


@contextlib.contextmanager
def real(model: str, config: EngineConfig) -> Iterator[tuple[Pipeline, Killer]]:
    """A pipeline with a model, whose workers can be killed."""
    from corogen import startup
    from corogen.adapters.pipeline import Pipeline

    executor = Killer(startup.make_executor(config))
    with Pipeline(model, config, executor=executor) as pipe:
        yield pipe, executor
