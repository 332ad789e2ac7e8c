"""What can be known before the model is loaded is said before, and nothing is left behind."""

import time

import pytest

from corogen.config import EngineConfig
from corogen.engine import Engine
from corogen.errors import ConfigError, TokenizerError
from corogen.params import GenerationConfig
from corogen.testing.tiny import tiny_model
from tests.engine.helpers import make_engine


class NeverReady:
    """An executor whose workers load for ever."""

    def __init__(self):
        self.ended = False

    async def start(self, spec, on_phase):
        import asyncio

        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True

    async def close(self):
        pass


async def test_a_broken_tokenizer_is_reported_while_the_workers_load(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{")
    executor = NeverReady()
    with pytest.raises(TokenizerError, match="tokenizer"):
        await Engine(str(tmp_path), executor=executor).start()
    assert executor.ended


async def test_a_broken_template_is_reported_while_the_workers_load(tmp_path):
    tiny_model(tmp_path, with_tokenizer=True)
    executor = NeverReady()
    with pytest.raises(ConfigError, match="chat_template"):
        await Engine(str(tmp_path), EngineConfig(chat_template="{{ x"), executor=executor).start()
    assert executor.ended


async def test_a_gpu_that_is_not_there_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tiny_model(tmp_path, with_tokenizer=True)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="device_type='cuda'"):
        await Engine(str(tmp_path), EngineConfig(device_type="cuda")).start()
    assert time.monotonic() - began < 5


async def test_a_progress_callback_that_raises_is_logged_and_harms_nothing(caplog):
    def progress(phase):
        raise ZeroDivisionError("of the caller")

    engine = make_engine()
    await engine.start(progress)
    assert (await engine.generate("x", GenerationConfig(max_new_tokens=2))).text == "xx"
    await engine.aclose()
    assert "of the caller" in caplog.text
