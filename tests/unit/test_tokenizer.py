"""Encoding, decoding and reading tokenizers from a folder."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from corogen.errors import TokenizerError
from corogen.testing.tokenizers import byte_level_tokenizer, ids_of, save_tokenizer, sentencepiece_tokenizer
from corogen.text.tokenizer import Tokenizer


def test_a_raw_text_gets_one_bos_and_a_chat_none():
    tokenizer = Tokenizer(byte_level_tokenizer(bos="<|bos|>"), {"bos_token": "<|bos|>"})
    bos = tokenizer.token_id("<|bos|>")
    assert tokenizer.bos_id == bos
    assert tokenizer.encode("a").count(bos) == 1
    assert tokenizer.encode("<|bos|>a") == tokenizer.encode("a")
    assert tokenizer.encode("a", add_special_tokens=False).count(bos) == 0
    assert tokenizer.encode("") == [bos]


def test_two_bos_that_the_caller_wrote_stay():
    tokenizer = Tokenizer(sentencepiece_tokenizer(), {"bos_token": "<s>"})
    assert tokenizer.encode("<s><s>").count(tokenizer.bos_id) == 2


def test_add_bos_token_in_the_config_overrules_tokenizer_json():
    plain, adding = byte_level_tokenizer(), byte_level_tokenizer(bos="<|bos|>")
    named = {"bos_token": "<|bos|>"}
    on, off = Tokenizer(plain, {**named, "add_bos_token": True}), Tokenizer(adding, {**named, "add_bos_token": False})
    assert on.encode("a") == [on.token_id("<|bos|>"), *off.encode("a")]
    assert on.encode("<|bos|>a") == on.encode("a")
    assert off.encode("") == []
    assert off.bos_id is None


def test_without_bos_nothing_is_added():
    tokenizer = Tokenizer(byte_level_tokenizer(), {"bos_token": "<|bos|>"})
    assert (tokenizer.encode(""), tokenizer.bos_id) == ([], None)


def test_names_and_numbers():
    tokenizer = Tokenizer(byte_level_tokenizer(), {"eos_token": {"content": "<|eos|>"}, "bos_token": None})
    assert tokenizer.eos_ids == {tokenizer.token_id("<|eos|>")} == {tokenizer.added_tokens["<|eos|>"]}
    assert tokenizer.bos_token is None
    assert tokenizer.vocab_size == max(tokenizer.added_tokens.values()) + 1
    assert Tokenizer(byte_level_tokenizer()).eos_ids == frozenset()


def test_special_tokens_are_skipped_or_shown():
    tokenizer = Tokenizer(byte_level_tokenizer())
    ids = [*tokenizer.encode("hello"), tokenizer.token_id("<|eos|>")]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<|eos|>"


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.from_folder(save_tokenizer(backend, tmp_path))
    assert len(tokenizer.encode("x" * 20)) == 20


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_ids_equal_those_of_transformers(tmp_path, make):
    from transformers import AutoTokenizer

    folder = save_tokenizer(make(), tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in ("Hello  world\n é 👍", "<|eos|></s>x", " leading", ""):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_reading_a_tokenizer_imports_neither_torch_nor_transformers(tmp_path):
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    program = (
        "import sys, pathlib; from corogen.text.tokenizer import Tokenizer; import corogen.admission\n"
        "Tokenizer.from_folder(pathlib.Path(sys.argv[1])).encode('hi')\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


def test_a_folder_without_a_tokenizer_is_named_with_the_remedy(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "version https://git-lfs.github.com/spec/v1"])
def test_a_broken_file_is_named(tmp_path, name, text):
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_folder(tmp_path)


def test_without_tokenizer_json_transformers_makes_one(tmp_path):
    backend = byte_level_tokenizer(words=("hello", " world"))
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps({**model["vocab"], "<|endoftext|>": len(model["vocab"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hello world") == ids_of(backend, ["hello", " world"])


def test_files_that_transformers_can_not_use_are_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(TokenizerError, match=r"transformers can not make"):
        Tokenizer.from_folder(tmp_path)


def test_many_threads_encode_and_decode_as_one_does():
    tokenizer = Tokenizer(byte_level_tokenizer(bos="<|bos|>"))
    texts = [f"{i} hello world é 你好 " * 20 for i in range(32)]

    def round_trip(text):
        return tokenizer.encode(text), tokenizer.decode(tokenizer.encode(text))

    expected = [round_trip(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == expected


def test_a_long_text_has_the_ids_of_its_parts():
    tokenizer = Tokenizer(byte_level_tokenizer())
    text = "Grüße aus Köln, " * 3000
    assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode("Grüße aus Köln, ") * 3000
