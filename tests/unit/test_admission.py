"""A prompt and its settings become one checked request, or an error that names what is wrong."""

import json
import logging

import pytest

from corogen.admission import Admission, is_batch, prompt_kind
from corogen.config import EngineConfig
from corogen.errors import (
    ChatTemplateError,
    CheckpointError,
    ConfigError,
    EmptyPrompt,
    InvalidRequest,
    PromptTooLong,
    TokenizerError,
    TokenOutOfRange,
)
from corogen.params import GenerationConfig, ModelFacts
from corogen.testing.tokenizers import byte_level_tokenizer, save_tokenizer
from corogen.text.chat import ChatTemplate
from corogen.text.tokenizer import Tokenizer

PLAIN = Tokenizer(byte_level_tokenizer())
BOS = Tokenizer(byte_level_tokenizer(bos="<|bos|>"))
TEMPLATE = ChatTemplate("<|bos|>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
FACTS = ModelFacts(max_len=64, vocab_size=PLAIN.vocab_size)
USER = {"role": "user", "content": "hello"}


@pytest.fixture
def admission():
    return Admission(PLAIN, TEMPLATE, FACTS)


def text_of(request):
    return PLAIN.decode(request.prompt_ids, skip_special_tokens=False)


class TestPrompts:
    def test_a_string_is_one_user_message(self, admission):
        assert text_of(admission.prepare("hello")) == "<|bos|>[user]hello"
        assert admission.prepare("hello").prompt_ids == admission.prepare([USER]).prompt_ids

    def test_a_string_without_preprocessing_is_raw_text(self, admission):
        assert text_of(admission.prepare("hello", do_preprocess=False)) == "hello"

    def test_a_string_for_a_model_without_template_is_raw_text(self):
        assert text_of(Admission(PLAIN, None, FACTS).prepare("hello")) == "hello"

    def test_token_ids_are_taken_as_they_are(self, admission):
        given = [5, 6, 7]
        request = admission.prepare(given)
        assert request.prompt_ids == given
        given.append(8)
        assert request.prompt_ids == [5, 6, 7]
        assert Admission(BOS, TEMPLATE, FACTS).prepare((5,)).prompt_ids == [5]

    def test_token_ids_need_no_tokenizer(self):
        admission = Admission(None, None, FACTS)
        assert admission.prepare([1, 2]).prompt_ids == [1, 2]
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            admission.prepare("hello")

    def test_messages_without_template_say_how_to_supply_one(self):
        with pytest.raises(ChatTemplateError, match="chat_template in EngineConfig"):
            Admission(PLAIN, None, FACTS).prepare([USER])

    def test_messages_are_not_raw_text(self, admission):
        with pytest.raises(InvalidRequest, match="do_preprocess"):
            admission.prepare([USER], do_preprocess=False)

    @pytest.mark.parametrize(
        ("prompt", "words"),
        [
            (None, "NoneType"),
            (3, "int"),
            (b"x", "bytes"),
            (USER, "dict: put the message into a list"),
            ({"a"}, "set"),
            ([None], "item 0 is a NoneType"),
            (["a"], "list of prompts"),
            ([[1]], "list of prompts"),
            ([USER, "a"], "messages and something else"),
            ([USER, 3], r"messages\[1\] must be a dict"),
            ([{"content": "x"}], "no role"),
            ([1, "a"], r"prompt\[1\] is 'a'"),
            ([1, 2.5], r"prompt\[1\] is 2.5"),
            ([True, 2], r"prompt\[0\] is True"),
        ],
    )
    def test_wrong_types_are_named(self, admission, prompt, words):
        with pytest.raises(InvalidRequest, match=words):
            admission.prepare(prompt)

    def test_an_array_is_named_with_the_remedy(self, admission):
        import numpy

        with pytest.raises(InvalidRequest, match=r"ndarray: call its tolist\(\)"):
            admission.prepare(numpy.array([1, 2]))

    @pytest.mark.parametrize("token_id", [-1, FACTS.vocab_size, 2**70])
    def test_an_id_out_of_range_is_named_with_the_range(self, admission, token_id):
        with pytest.raises(
            TokenOutOfRange, match=f"token 1 of the prompt is {token_id}; .* 0 to {PLAIN.vocab_size - 1}"
        ):
            admission.prepare([0, token_id])

    def test_text_whose_tokens_the_model_does_not_embed_is_refused(self):
        small = ModelFacts(max_len=64, vocab_size=256)
        admission = Admission(PLAIN, None, small)
        assert admission.prepare("x y")
        with pytest.raises(TokenOutOfRange, match="0 to 255"):
            admission.prepare("hello")

    @pytest.mark.parametrize("prompt", ["bad \ud800 text", [{"role": "user", "content": "\udfff"}]])
    def test_lone_surrogates_are_refused(self, admission, prompt):
        with pytest.raises(InvalidRequest, match=r"lone surrogate '\\ud"):
            admission.prepare(prompt)


class TestEmpty:
    @pytest.mark.parametrize("prompt", ["", [], ()])
    @pytest.mark.parametrize("template", [None, TEMPLATE])
    def test_nothing_is_refused(self, prompt, template):
        with pytest.raises(EmptyPrompt):
            Admission(PLAIN, template, FACTS).prepare(prompt)

    def test_an_empty_text_runs_on_the_bos_alone(self):
        admission = Admission(BOS, None, FACTS)
        assert admission.prepare("").prompt_ids == [BOS.bos_id]
        assert Admission(BOS, TEMPLATE, FACTS).prepare("", do_preprocess=False).prompt_ids == [BOS.bos_id]

    def test_an_empty_message_of_a_chat_is_the_callers_business(self, admission):
        assert text_of(admission.prepare([{"role": "user", "content": ""}])) == "<|bos|>[user]"

    def test_a_template_that_writes_nothing(self):
        with pytest.raises(EmptyPrompt, match="no tokens"):
            Admission(PLAIN, ChatTemplate(""), FACTS).prepare("hello")


class TestLength:
    def test_one_token_must_stay_free(self, admission):
        assert admission.prepare([1] * 63).max_new_tokens == 1
        for length in (64, 65, 300):
            with pytest.raises(PromptTooLong) as caught:
                admission.prepare([1] * length)
            assert (caught.value.num_tokens, caught.value.limit) == (length, 64)
            assert str(length) in str(caught.value)
            assert "64" in str(caught.value)

    def test_more_new_tokens_than_fit_are_a_bound(self, admission):
        assert admission.prepare([1] * 60, GenerationConfig(max_new_tokens=10**6)).max_new_tokens == 4
        assert admission.prepare([1] * 60, GenerationConfig(max_new_tokens=None)).max_new_tokens == 4
        assert admission.prepare([1] * 60, GenerationConfig(max_new_tokens=3)).max_new_tokens == 3

    def test_long_prompts_are_worth_a_thread(self, admission):
        assert not admission.is_long("x" * 8000)
        assert admission.is_long("x" * 8001)
        assert admission.is_long([{"role": "user", "content": "x" * 5000}] * 2)
        assert admission.is_long([{"role": "user", "content": [{"type": "text", "text": "x" * 9000}]}])
        for short in ([1] * 10**5, [], None, [None], [{"role": "user"}], 3, [{"content": [3]}]):
            assert not admission.is_long(short)


class TestRequests:
    def test_ids_are_given_or_new(self, admission):
        assert admission.prepare("a", request_id="mine").id == "mine"
        assert admission.prepare("a").id != admission.prepare("a").id

    def test_settings_are_checked_and_resolved(self, admission):
        request = admission.prepare([1], GenerationConfig(priority=3, skip_special_tokens=False, stop_words="x"))
        assert (request.priority, request.skip_special_tokens, request.stop.strings) == (3, False, ("x",))
        with pytest.raises(InvalidRequest, match="temperature"):
            admission.prepare([1], GenerationConfig(temperature=float("nan")))

    def test_they_do_not_change(self, admission):
        with pytest.raises(AttributeError):
            admission.prepare([1]).priority = 3


@pytest.mark.parametrize(
    ("prompts", "batch"),
    [
        ("hello", False),
        ([USER], False),
        ([1, 2], False),
        ((1, 2), False),
        ([True], False),
        ([], True),
        (["a", "b"], True),
        ([[USER], [USER]], True),
        ([[1], [2, 3]], True),
        ([[]], True),
        (["a", [USER], [1], ""], True),
        (("a",), True),
    ],
)
def test_one_prompt_or_a_batch(prompts, batch):
    assert is_batch(prompts) is batch


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "NoneType"),
        (USER, "dict"),
        (iter(["a"]), "iterator"),
        (["a", None], "item 1 is a NoneType"),
        (["a", 5], "item 1 .* int"),
        ([["x"], USER], "item 1 .* dict"),
        ([object()], "object"),
    ],
)
def test_what_is_neither_is_named(prompts, words):
    with pytest.raises(InvalidRequest, match=words):
        is_batch(prompts)


def test_an_empty_list_is_no_prompt():
    with pytest.raises(EmptyPrompt):
        prompt_kind([])


class TestFromFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        return save_tokenizer(byte_level_tokenizer(), tmp_path, eos_token="<|eos|>", chat_template="{{ messages }}")

    def load(self, folder, vocab_size=PLAIN.vocab_size, **options):
        return Admission.from_folder(folder, EngineConfig(**options), max_len=64, vocab_size=vocab_size)

    def write(self, folder, name, **entries):
        (folder / name).write_text(json.dumps(entries))
        return folder / name

    def test_end_tokens_are_the_union_of_all_files(self, folder):
        self.write(folder, "config.json", eos_token_id=3, text_config={"eos_token_id": [4]})
        self.write(folder, "generation_config.json", eos_token_id=[5, 6])
        eos = PLAIN.token_id("<|eos|>")
        assert self.load(folder).facts.eos_ids == {3, 4, 5, 6, eos}
        assert self.load(folder, generation_config="none").facts.eos_ids == {3, 4, 5, 6, eos}
        assert self.load(folder, hf_overrides={"eos_token_id": 7}).facts.eos_ids == {7, 4, 5, 6, eos}

    def test_end_tokens_that_can_not_come_are_left_out(self, folder):
        self.write(folder, "config.json", eos_token_id=[-1, 10**6, None, "x"])
        assert self.load(folder).facts.eos_ids == {PLAIN.token_id("<|eos|>")}

    def test_sampling_defaults_are_the_files(self, folder, caplog):
        self.write(folder, "generation_config.json", temperature=0.1, top_k=1, max_length=20, top_p=None)
        with caplog.at_level(logging.INFO, "corogen"):
            assert self.load(folder).facts.defaults == {"temperature": 0.1, "top_k": 1}
        assert [r.getMessage() for r in caplog.records if "temperature=0.1, top_k=1" in r.getMessage()]

    def test_sampling_defaults_can_be_ignored_or_come_from_elsewhere(self, folder, tmp_path):
        self.write(folder, "generation_config.json", temperature=0.1)
        other = self.write(tmp_path, "other.json", temperature=0.7)
        assert self.load(folder, generation_config="none").facts.defaults == {}
        assert self.load(folder, generation_config=str(other)).facts.defaults == {"temperature": 0.7}
        assert self.load(folder, generation_config=str(folder)).facts.defaults == {"temperature": 0.1}

    def test_a_default_that_can_not_be_is_named_and_left_out(self, folder, caplog):
        self.write(folder, "generation_config.json", temperature=-1, top_p=0.5)
        assert self.load(folder).facts.defaults == {"top_p": 0.5}
        assert "temperature" in caplog.text

    def test_files_that_can_not_be_read_are_named(self, folder, tmp_path):
        bad = tmp_path / "bad.json"
        bad.write_text("{")
        for setting in (str(bad), str(tmp_path / "missing.json")):
            with pytest.raises(ConfigError, match="generation_config="):
                self.load(folder, generation_config=setting)
        for name in ("generation_config.json", "config.json"):
            (folder / name).write_text("[]")
            with pytest.raises(CheckpointError, match=name):
                self.load(folder)
            (folder / name).unlink()

    def test_a_chat_template_can_be_supplied(self, folder):
        admission = self.load(folder, chat_template="{{ messages[0].content }}!")
        assert text_of(admission.prepare("hello")) == "hello!"

    def test_a_missing_chat_template_is_warned_of_once(self, tmp_path, caplog):
        admission = self.load(save_tokenizer(byte_level_tokenizer(), tmp_path))
        admission.prepare("hello")
        assert [r.levelname for r in caplog.records if "no chat template" in r.getMessage()] == ["WARNING"]

    def test_a_tokenizer_larger_than_the_model_is_warned_of(self, folder, caplog):
        admission = self.load(folder, vocab_size=256)
        assert "model embeds 256" in caplog.text
        assert admission.facts.added_tokens == {}

    def test_added_tokens_are_known(self, folder):
        assert self.load(folder).facts.added_tokens == PLAIN.added_tokens

    def test_no_tokenizer(self, tmp_path):
        with pytest.raises(TokenizerError):
            self.load(tmp_path)
