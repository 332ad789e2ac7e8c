"""Streaming and stop strings: faults that people reported of other engines, each with its source.

The answer's tokens are scripted, and go through what the engine sends every token through.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from corogen.admission import Admission
from corogen.errors import InvalidRequest
from corogen.params import GenerationConfig, ModelFacts
from corogen.request import ActiveRequest
from corogen.testing.tokenizers import byte_level_tokenizer, ids_of, sentencepiece_tokenizer
from corogen.text.detokenize import Detokenizer
from corogen.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Reader:
    """Keeps what a request sends."""

    def __init__(self, streaming):
        self.pieces = streaming
        self.deltas, self.ids, self.reason, self.stopped_by = [], [], None, None

    def began(self, prompt_len):
        pass

    def push(self, text, token_id):
        self.deltas.append(text)
        self.ids.append(token_id)

    def end(self, text, reason, stop_reason, cached):
        self.deltas.append(text)
        self.reason, self.stopped_by = reason, stop_reason

    def fail(self, error):
        raise error

    @property
    def text(self):
        return "".join(self.deltas)


def answer(backend, tokens, *, prompt="Q", streaming=True, eos=(), **config):
    """What a reader gets of a model that says `tokens` (texts or ids)."""
    tokenizer = Tokenizer(backend)
    facts = ModelFacts(4096, tokenizer.vocab_size, frozenset(eos), added_tokens=tokenizer.added_tokens)
    request = Admission(tokenizer, None, facts).prepare(prompt, GenerationConfig(**config))
    reader = Reader(streaming)
    active = ActiveRequest(request, reader, tokenizer)
    for token in (ids_of(backend, [t])[0] if isinstance(t, str) else t for t in tokens):
        active.seq.tokens.append(token)
        if active.advance(token):
            break
    return reader


def batches(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]


both_ways = pytest.mark.parametrize("streaming", [True, False])


class TestDetokenising:
    def test_characters_of_several_tokens_come_whole(self):
        """QwenLM/Qwen#215"""
        text = "你好，世界 👨‍👩‍👧 é"
        backend = byte_level_tokenizer(words=())
        ids = backend.encode(text).ids
        reader = answer(backend, ids, max_new_tokens=len(ids))
        assert reader.text == text == backend.decode(ids)
        assert reader.text == answer(backend, ids, max_new_tokens=len(ids), streaming=False).text
        assert not any(REPLACEMENT in delta for delta in reader.deltas)
        assert len([delta for delta in reader.deltas if delta]) == len(text)

    def test_an_answer_cut_inside_a_character_ends_as_the_decode_shows_it(self):
        """QwenLM/Qwen#215"""
        backend = byte_level_tokenizer(words=())
        ids = backend.encode("ok 👍").ids[:-1]
        reader = answer(backend, ids, max_new_tokens=len(ids))
        assert reader.deltas[-1] == REPLACEMENT
        assert reader.text == backend.decode(ids)

    @both_ways
    def test_spaces_and_newlines_of_sentencepiece_survive(self, streaming):
        """huggingface/transformers#22710"""
        backend = sentencepiece_tokenizer(words=("▁Hello", "▁world", "▁y"))
        ids = ids_of(backend, ["▁Hello", "▁world", "▁", "▁", "x", "\n", "▁y"])
        reader = answer(backend, ids, max_new_tokens=len(ids), streaming=streaming)
        assert reader.text == backend.decode(ids) == "Hello world  x\n y"

    @pytest.mark.parametrize("interval", range(1, 9))
    def test_pieces_of_any_number_of_tokens_join_to_the_whole(self, interval):
        """huggingface/transformers#28776"""
        backend = sentencepiece_tokenizer()
        ids = ids_of(backend, ["▁Hello", "ing", "▁", "▁world", "<0xC3>", "<0xA9>"] * 5)
        stream = Detokenizer(Tokenizer(backend))
        chunks = ["".join(map(stream.push, chunk)) for chunk in batches(ids, interval)]
        assert "".join([*chunks, stream.flush()]) == backend.decode(ids)

    @pytest.mark.parametrize("unknown", [515, 10**6])
    @both_ways
    def test_ids_beyond_the_tokenizer_are_no_text(self, unknown, streaming):
        """vllm-project/vllm#340"""
        backend = byte_level_tokenizer()
        reader = answer(backend, ["hello", unknown, " world"], max_new_tokens=3, streaming=streaming)
        assert reader.text == "hello world"
        assert reader.ids[1] == unknown

    def test_threads_share_a_tokenizer(self):
        """vllm-project/vllm#40949"""
        tokenizer = Tokenizer(byte_level_tokenizer())
        prompts = [f"{i} {'hello world é ' * 40}"[:500] for i in range(32)]
        expected = [tokenizer.encode(prompt) for prompt in prompts]
        with ThreadPoolExecutor(32) as pool:
            encoded = [pool.submit(tokenizer.encode, prompt) for prompt in prompts]
            stops = [pool.submit(tokenizer.encode, "STOP", add_special_tokens=False) for _ in prompts]
            decoded = [tokenizer.decode(ids) for ids in expected]
            assert [future.result() for future in encoded] == expected
            assert len({tuple(future.result()) for future in stops}) == 1
        assert decoded == prompts


class TestStopStrings:
    DIGITS = ("456", "89", "0123")

    @both_ways
    def test_one_that_is_spread_over_tokens_leaks_nothing(self, streaming):
        """vllm-project/vllm#3574"""
        backend = byte_level_tokenizer(words=self.DIGITS)
        said = ["456", "7", "89", "0", "!"]
        reader = answer(backend, said, prompt="Count: 0123", stop_words=["4567890"], streaming=streaming)
        assert (reader.text, reader.reason, reader.stopped_by) == ("", "stop", "4567890")

    def test_one_that_does_not_complete_is_let_go_at_once(self):
        """vllm-project/vllm#3574"""
        backend = byte_level_tokenizer(words=self.DIGITS)
        reader = answer(backend, ["456", "7", "x", "y"], stop_words=["4567890"], max_new_tokens=4)
        assert reader.deltas[:4] == ["", "", "4567x", "y"]

    @both_ways
    def test_one_that_is_no_special_token_and_spelled_in_pieces(self, streaming):
        """huggingface/text-generation-inference#1254"""
        backend = byte_level_tokenizer(words=("Hi", "im", "_end"))
        said = ["Hi", "<", "|", "im", "_end", "|", ">", "Hi"]
        reader = answer(backend, said, stop_words=["<|im_end|>"], streaming=streaming)
        assert (reader.text, reader.reason) == ("Hi", "stop")
        assert len(reader.ids) == 7

    @both_ways
    def test_one_at_the_end_of_a_longer_token(self, streaming):
        """ggml-org/llama.cpp#9867"""
        backend = byte_level_tokenizer(words=("?\n",))
        reader = answer(backend, ["?\n"], prompt="Q: is the sky blue", stop_words=["\n"], streaming=streaming)
        assert (reader.text, reader.reason) == ("?", "stop")

    @both_ways
    @pytest.mark.parametrize("ending", ["stop", "length"])
    def test_text_that_was_kept_back_is_delivered_at_the_end(self, ending, streaming):
        """ggml-org/llama.cpp#15007"""
        backend = byte_level_tokenizer(words=("one", " two", " three"))
        eos = backend.token_to_id("<|eos|>")
        said = ["one", " two", " three", eos]
        limit = 4 if ending == "stop" else 3
        reader = answer(
            backend, said, eos=[eos], stop_words=["three\nBBBBBBBB"], max_new_tokens=limit, streaming=streaming
        )
        assert (reader.text, reader.reason) == ("one two three", ending)

    def test_a_long_one_delays_nothing_that_can_not_begin_it(self):
        """vllm-project/vllm#11089"""
        backend = byte_level_tokenizer(words=tuple(f" {c}" for c in "abcdef"))
        said = [f" {c}" for c in "abcdef"]
        reader = answer(backend, said, stop_words=["Z" * 20], max_new_tokens=6)
        assert reader.deltas == [*said, ""]

    @both_ways
    @pytest.mark.parametrize("skip", [True, False])
    def test_one_that_is_a_special_token(self, skip, streaming):
        """vllm-project/vllm#2123"""
        backend = byte_level_tokenizer(special=("<stop>",))
        said = ["a", "b", "<stop>", "c"]
        reader = answer(backend, said, stop_words=["<stop>"], skip_special_tokens=skip, streaming=streaming)
        assert (reader.text, reader.reason) == ("ab", "stop")
        assert reader.ids == ids_of(backend, said[:3])

    @both_ways
    @pytest.mark.parametrize(("include", "text"), [(False, "x "), (True, "x STOP")])
    def test_it_is_cut_off_or_shown_and_always_reported(self, include, text, streaming):
        """vllm-project/vllm#1973"""
        backend = byte_level_tokenizer(words=("x ", "STOP", " y"))
        options = {"stop_words": ["END", "STOP"], "include_stop_str_in_output": include}
        reader = answer(backend, ["x ", "STOP", " y"], streaming=streaming, **options)
        assert (reader.text, reader.stopped_by) == (text, "STOP")

    @both_ways
    @pytest.mark.parametrize(("include", "text"), [(False, "x "), (True, "x STOP")])
    def test_it_is_cut_inside_a_token(self, include, text, streaming):
        """vllm-project/vllm#1973"""
        backend = byte_level_tokenizer(words=("x STOP y",))
        options = {"stop_words": ["END", "STOP"], "include_stop_str_in_output": include}
        assert answer(backend, ["x STOP y"], streaming=streaming, **options).text == text

    @pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
    def test_an_empty_one_is_refused(self, stop):
        """sgl-project/sglang#38712"""
        with pytest.raises(InvalidRequest, match="stop_words") as caught:
            answer(byte_level_tokenizer(), ["a"], stop_words=stop)
        assert caught.value.param == "stop_words"

    @pytest.mark.parametrize("stop", [None, []])
    def test_none_at_all(self, stop):
        """sgl-project/sglang#38712"""
        reader = answer(byte_level_tokenizer(), ["a", "b"], stop_words=stop, max_new_tokens=2)
        assert (reader.text, reader.reason, reader.stopped_by) == ("ab", "length", None)


class TestEndTokens:
    @both_ways
    def test_any_of_the_models_end_tokens_ends_the_answer(self, streaming):
        """vllm-project/vllm#4180"""
        backend = byte_level_tokenizer(words=("hi", "junk"), special=("<a>", "<b>"))
        eos = ids_of(backend, ["<a>", "<b>"])
        reader = answer(backend, ["hi", "<b>", "junk"], eos=eos, skip_special_tokens=False, streaming=streaming)
        assert (reader.text, reader.reason, reader.stopped_by) == ("hi", "stop", None)
        free = answer(backend, ["hi", "<b>", "junk"], eos=eos, ignore_eos=True, max_new_tokens=3, streaming=streaming)
        assert (free.text, free.reason) == ("hijunk", "length")
