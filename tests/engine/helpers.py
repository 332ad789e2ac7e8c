"""An engine over scripted answers."""

from corogen import engine as engine_module
from corogen.config import EngineConfig
from corogen.testing import FakeExecutor
from corogen.testing.tokenizers import byte_level_tokenizer
from corogen.text.tokenizer import Tokenizer

ENDLESS = 10_000


def tokenizer():
    return Tokenizer(byte_level_tokenizer(), {"eos_token": "<|eos|>"})


def says(text, *, tok=None, then_eos=False):
    """A script that answers every prompt with the ids of `text`."""
    tok = tok or tokenizer()
    ids = tok.encode(text, add_special_tokens=False) + ([tok.backend.token_to_id("<|eos|>")] if then_eos else [])
    return lambda prompt: ids


def repeats_the_prompt(prompt):
    return prompt * 40


def make_engine(script=repeats_the_prompt, *, tok=None, executor=None, fake=None, **config):
    executor = executor or FakeExecutor(script, **(fake or {}))
    return engine_module.Engine(config=EngineConfig(**config), executor=executor, tokenizer=tok or tokenizer())


def assert_idle(engine):
    """Nothing runs, no block is used, no slot is taken, no request is remembered."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    engine.steps.scheduler.check()
    assert engine.steps.num_active == 0
    assert not engine.request_ids()


async def settle(engine):
    """Until the engine is idle: every step in flight has answered."""
    import asyncio

    for _ in range(1000):
        if engine.steps.scheduler.idle and not engine._intake.num_posted:
            return
        await asyncio.sleep(0)
    raise AssertionError("the engine did not become idle")
