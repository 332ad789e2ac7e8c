"""A scripted model behind every name; as a program: `python -m tests.adapters.scripted_main PROGRAM`."""

import runpy
import sys

import pytest

from corogen import startup
from corogen.admission import Admission
from corogen.params import ModelFacts
from corogen.testing import FakeExecutor
from corogen.text.chat import ChatTemplate
from tests.engine.helpers import tokenizer


def said(message):
    """What the scripted model answers to a message."""
    return f"You said: {message}"


def script_every_engine(patch, **fake):
    """Every engine that is made from now on repeats the last message, whatever model it was asked for."""
    tok = tokenizer()
    ids = tok.encode(said(""), add_special_tokens=False)

    async def no_files(*args):
        return None

    def make_admission(config, path, given, max_len, vocab_size):
        facts = ModelFacts(max_len, vocab_size, frozenset(tok.eos_ids), added_tokens=tok.added_tokens)
        return Admission(tok, ChatTemplate("{{ messages[-1].content }}"), facts)

    def make_executor(config):
        return FakeExecutor(lambda prompt: [*ids, *prompt, *tok.eos_ids], vocab_size=50_000, **fake)

    patch.setattr(startup, "find_model", no_files)
    patch.setattr(startup, "make_admission", make_admission)
    patch.setattr(startup, "make_executor", make_executor)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        script_every_engine(monkeypatch)
        runpy.run_path(sys.argv[1], run_name="__main__")
