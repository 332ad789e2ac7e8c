"""transformers in its own process: the same tokens by every way of generating, and errors that arrive."""

import pytest

from corogen.adapters.bench import machine
from corogen.adapters.bench import peer as peer_module
from corogen.adapters.bench.peer import PeerError, PeerProcess
from corogen.testing.tiny import tiny_model

NEW = 6


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    with PeerProcess(tiny_model(tmp_path_factory.mktemp("tiny"), with_tokenizer=True), threads=1) as process:
        yield process


def test_a_batch_gives_every_prompt_its_tokens_and_they_equal_those_of_one_alone(peer):
    prompts = [[{"role": "user", "content": "Hello there!"}], [5, 6, 7]]
    together = peer.run("batch", prompts, NEW)
    assert (together["tokens"], together["seconds"] > 0) == (2 * NEW, True)
    alone = [peer.run("one", [prompt], NEW)["ids"][0] for prompt in prompts]
    assert together["ids"] == alone


def test_an_error_of_transformers_arrives_and_the_process_goes_on(peer):
    with pytest.raises(PeerError, match="IndexError"):
        peer.run("batch", [[100_000]], NEW)
    assert peer.run("one", [[5]], NEW)["tokens"] == NEW


def test_versions_come_from_the_process_that_ran(peer):
    assert set(peer.versions) == {"torch", "transformers"}


def test_a_process_that_dies_is_reported(tmp_path):
    before = set(machine.children())
    with pytest.raises(PeerError, match="no_such_folder"):
        PeerProcess(tmp_path / "no_such_folder", threads=1)
    assert set(machine.children()) == before


def test_a_killed_process_is_an_error_with_its_last_words(monkeypatch, tmp_path):
    child = tmp_path / "peer_child.py"
    child.write_text("import sys; sys.exit('no torch today')")
    monkeypatch.setattr(peer_module, "CHILD", child)
    with pytest.raises(PeerError, match="no torch today"):
        PeerProcess(tmp_path, threads=1)
