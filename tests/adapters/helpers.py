"""Pipelines over scripted answers, and the loops that callers run on."""

import asyncio
import contextlib
import functools

import trio
import uvloop

from corogen.adapters.pipeline import Pipeline, pipeline
from corogen.params import GenerationConfig
from corogen.testing import FakeExecutor
from tests.conftest import eventually
from tests.engine.helpers import assert_idle, repeats_the_prompt, tokenizer

SHORT = GenerationConfig(max_new_tokens=12)
ENDLESS = GenerationConfig(max_new_tokens=None)

#: how a caller runs `async def main()`
LOOPS = {
    "asyncio": functools.partial(asyncio.run, debug=True),
    "uvloop": uvloop.run,
    "trio": lambda coro: trio.run(lambda: coro),
}


def make_pipe(script=repeats_the_prompt, *, tok=None, fake=None, **config) -> Pipeline:
    """A pipeline that answers every prompt with itself, again and again."""
    fake = {"num_blocks": 8192, **(fake or {})}
    return pipeline(executor=FakeExecutor(script, **fake), tokenizer=tok or tokenizer(), **config)


@contextlib.contextmanager
def scripted(*args, **options):
    """The same, and at the end nothing may run in it any more."""
    with make_pipe(*args, **options) as pipe:
        yield pipe
        assert_nothing_runs(pipe)


def slowly(**config):
    """Steps of a millisecond, so that an endless answer has no end in sight."""
    return scripted(fake={"step_time_s": 0.001, "max_positions": 20_000}, **config)


def idle(pipe):
    async def look():
        engine = pipe.engine
        return engine.steps.scheduler.idle and not engine._intake.num_posted and not engine.request_ids()

    return pipe.thread.run(look())


def assert_nothing_runs(pipe):
    assert eventually(lambda: idle(pipe)), pipe.stats()

    async def check():
        assert_idle(pipe.engine)

    pipe.thread.run(check())


_TOKENIZER = tokenizer()


def expected(prompt, config=SHORT):
    """The text that a scripted pipeline answers with."""
    ids = _TOKENIZER.encode(prompt, add_special_tokens=True)
    return _TOKENIZER.decode((ids * 40)[: config.max_new_tokens], skip_special_tokens=True)
