"""Pages are run with a scripted model behind every name."""

import pytest

from corogen import startup
from corogen.admission import Admission
from corogen.params import ModelFacts
from corogen.testing import FakeExecutor
from corogen.testing.tiny import CHAT_TEMPLATE
from corogen.testing.tokenizers import byte_level_tokenizer
from corogen.text.chat import ChatTemplate
from corogen.text.tokenizer import Tokenizer

ANSWER = "The capital of France is Paris."


@pytest.fixture
def scripted(monkeypatch):
    """Every engine that is made answers every prompt with ANSWER, whatever model it was asked for."""
    tokenizer = Tokenizer(byte_level_tokenizer(), {"eos_token": "<|eos|>"})
    ids = [*tokenizer.encode(ANSWER, add_special_tokens=False), *tokenizer.eos_ids]

    async def no_files(*args):
        return None

    def make_admission(config, path, given, max_len, vocab_size):
        facts = ModelFacts(max_len, vocab_size, frozenset(tokenizer.eos_ids), added_tokens=tokenizer.added_tokens)
        return Admission(tokenizer, ChatTemplate(CHAT_TEMPLATE), facts)

    monkeypatch.setattr(startup, "find_model", no_files)
    monkeypatch.setattr(startup, "make_admission", make_admission)
    monkeypatch.setattr(startup, "make_executor", lambda config: FakeExecutor(lambda prompt: ids, vocab_size=50_000))
