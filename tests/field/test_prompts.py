"""Prompts, templates and files of a model: faults that people reported of other engines, each with its source."""

import json
import logging

import pytest
from tokenizers import Regex, pre_tokenizers

from corogen.admission import Admission, is_batch
from corogen.config import EngineConfig
from corogen.errors import ChatTemplateError, EmptyPrompt, InvalidRequest, PromptTooLong, TokenOutOfRange
from corogen.params import GenerationConfig, ModelFacts, resolve
from corogen.testing.tokenizers import byte_level_tokenizer, ids_of, save_tokenizer
from corogen.text.chat import ChatTemplate
from corogen.text.tokenizer import Tokenizer

WITH_BOS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
USER = {"role": "user", "content": "hello"}


def load(folder, *, vocab_size=400, max_len=64, **options):
    return Admission.from_folder(folder, EngineConfig(**options), max_len=max_len, vocab_size=vocab_size)


class TestEmptyPrompts:
    """vllm-project/vllm#7283"""

    @pytest.fixture(params=[None, "<|bos|>"], ids=["no bos", "bos"])
    def bos(self, request):
        return request.param

    @pytest.fixture
    def admission(self, bos):
        tokenizer = Tokenizer(byte_level_tokenizer(bos=bos), WITH_BOS)
        return Admission(tokenizer, None, ModelFacts(max_len=64, vocab_size=tokenizer.vocab_size))

    def test_an_empty_text_runs_on_the_bos_or_not_at_all(self, admission, bos):
        if bos is None:
            with pytest.raises(EmptyPrompt):
                admission.prepare("")
        else:
            assert admission.prepare("").prompt_ids == [admission.tokenizer.token_id(bos)]

    def test_lists_that_hold_nothing(self, admission):
        assert is_batch([])
        assert is_batch([""])
        assert is_batch([[]])
        assert is_batch(["a", ""])
        with pytest.raises(EmptyPrompt):
            admission.prepare([])


class TestOneBos:
    """vllm-project/vllm#9519"""

    @pytest.fixture
    def admission(self, tmp_path):
        template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        backend = byte_level_tokenizer(bos="<|bos|>")
        return load(save_tokenizer(backend, tmp_path, **WITH_BOS, add_bos_token=True, chat_template=template))

    def test_a_chat_a_prompt_and_raw_text_have_one(self, admission):
        bos = admission.tokenizer.bos_id
        chat = admission.prepare([USER]).prompt_ids
        assert chat == admission.prepare("hello").prompt_ids
        assert chat == admission.prepare("hello", do_preprocess=False).prompt_ids
        assert chat == admission.prepare("<|bos|>hello", do_preprocess=False).prompt_ids
        assert chat.count(bos) == 1
        assert chat[0] == bos

    def test_token_ids_stay_as_they_are(self, admission):
        bos = admission.tokenizer.bos_id
        for ids in ([5], [bos, 5], [bos, bos, 5]):
            assert admission.prepare(ids).prompt_ids == ids


class TestChatTemplates:
    """vllm-project/vllm#39279"""

    def test_without_one_chats_are_refused_with_the_remedy(self, tmp_path, caplog):
        admission = load(save_tokenizer(byte_level_tokenizer(), tmp_path))
        assert "no chat template" in caplog.text
        assert admission.prepare("hello").prompt_ids == admission.tokenizer.encode("hello")
        with pytest.raises(ChatTemplateError, match="chat_template"):
            admission.prepare([USER])

    def test_one_from_a_file_or_as_text(self, tmp_path):
        folder = save_tokenizer(byte_level_tokenizer(), tmp_path / "model")
        (tmp_path / "mine.jinja").write_text("<{{ messages[0].content }}>")
        for given in (str(tmp_path / "mine.jinja"), "<{{ messages[0].content }}>"):
            admission = load(folder, chat_template=given)
            assert admission.tokenizer.decode(admission.prepare([USER]).prompt_ids) == "<hello>"

    def test_chat_template_jinja(self, tmp_path):
        folder = save_tokenizer(byte_level_tokenizer(), tmp_path, chat_template="old")
        (folder / "chat_template.jinja").write_text("new")
        admission = load(folder)
        assert admission.tokenizer.decode(admission.prepare([USER]).prompt_ids) == "new"

    def test_named_ones(self, tmp_path):
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        admission = load(save_tokenizer(byte_level_tokenizer(), tmp_path, chat_template=named))
        assert admission.tokenizer.decode(admission.prepare([USER]).prompt_ids) == "plain"
        assert admission.template.render([USER], tools=[{"type": "function"}]) == "tools"

    def test_text_parts_are_joined_and_others_refused(self):
        """vllm-project/vllm#16245"""
        template = ChatTemplate("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}")
        parts = [{"type": "text", "text": "Explain "}, {"type": "text", "text": "RoPE"}]
        for role in ("system", "user"):
            joined = template.render([{"role": role, "content": parts}])
            assert joined == template.render([{"role": role, "content": "Explain RoPE"}])
        with pytest.raises(InvalidRequest, match="image_url"):
            template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])

    def test_a_null_content_is_never_written(self):
        """lmstudio-ai/lmstudio-bug-tracker#261"""
        call = {"id": "1", "type": "function", "function": {"name": "lookup_value", "arguments": "{}"}}
        messages = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "17.5"},
        ]
        template = ChatTemplate(
            "{% for m in messages %}{{ m.role + ':' + m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %};{% endfor %}"
        )
        assert template.render(messages) == "user:hello;assistant:lookup_value;tool:17.5;"

    def test_a_refusal_is_the_callers_error_in_the_templates_words(self):
        """sgl-project/sglang#892"""
        template = ChatTemplate(
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        )
        with pytest.raises(InvalidRequest, match="System role not supported"):
            template.render([{"role": "system", "content": "x"}, USER])


class TestModelFiles:
    def test_end_tokens_of_every_file_count(self, tmp_path):
        """vllm-project/vllm#4180"""
        backend = byte_level_tokenizer(special=("<a>", "<b>"))
        a, b = ids_of(backend, ["<a>", "<b>"])
        folder = save_tokenizer(backend, tmp_path, eos_token="<a>")
        (folder / "config.json").write_text(json.dumps({"eos_token_id": a}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [a, b]}))
        admission = load(folder)
        assert admission.prepare("x").stop.token_ids == {a, b}
        assert admission.prepare("x", GenerationConfig(ignore_eos=True)).stop.token_ids == set()

    def test_request_goes_before_file_goes_before_engine(self, tmp_path, caplog):
        """vllm-project/vllm#15241"""
        folder = save_tokenizer(byte_level_tokenizer(), tmp_path)
        defaults = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.05}
        (folder / "generation_config.json").write_text(json.dumps(defaults))
        with caplog.at_level(logging.INFO, "corogen"):
            facts = load(folder).facts
        assert "temperature=0.1, top_k=1, repetition_penalty=1.05" in caplog.text
        sampling = resolve(GenerationConfig(do_sample=True, top_k=9), 1, facts).sampling
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.1, 9, 1.05)
        asked = GenerationConfig(do_sample=True, temperature=10, top_k=3, repetition_penalty=1.0)
        sampling = resolve(asked, 1, facts).sampling
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (10, 3, 1.0)
        ignored = load(folder, generation_config="none").facts
        sampling = resolve(GenerationConfig(do_sample=True), 1, ignored).sampling
        assert (sampling.temperature, sampling.repetition_penalty) == (1.0, 1.0)

    def test_a_tokenizer_larger_than_the_model(self, tmp_path, caplog):
        """vllm-project/vllm#340"""
        admission = load(save_tokenizer(byte_level_tokenizer(), tmp_path), vocab_size=256)
        assert "the model embeds 256" in caplog.text
        with pytest.raises(TokenOutOfRange, match="from 0 to 255"):
            admission.prepare("hello")
        assert admission.prepare("x").prompt_ids

    def test_no_padding_and_no_truncation(self, tmp_path):
        """huggingface/transformers#25790"""
        backend = byte_level_tokenizer()
        backend.enable_padding(length=50)
        backend.enable_truncation(10)
        admission = load(save_tokenizer(backend, tmp_path, eos_token="<|eos|>", pad_token="<|eos|>"))
        eos = admission.tokenizer.token_id("<|eos|>")
        for length in (3, 17, 40):
            assert len(admission.prepare("x" * length).prompt_ids) == length
        assert admission.prepare("x<|eos|>y").prompt_ids[1] == eos
        assert len(admission.prepare("x<|eos|>y").prompt_ids) == 3


class TestLength:
    @pytest.mark.parametrize("length", [64, 65, 300])
    def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(self, length):
        """vllm-project/vllm#765, vllm-project/vllm#16445"""
        admission = Admission(None, None, ModelFacts(max_len=64, vocab_size=10))
        with pytest.raises(PromptTooLong, match=f"{length} tokens .* 64"):
            admission.prepare([1] * length)

    def test_one_free_place_is_one_new_token(self):
        """vllm-project/vllm#16445, ggml-org/llama.cpp#3969"""
        admission = Admission(None, None, ModelFacts(max_len=64, vocab_size=10))
        assert admission.prepare([1] * 63).max_new_tokens == 1
        assert admission.prepare([1] * 60).max_new_tokens == 4


class TestGguf:
    """huggingface/transformers#31630"""

    TEXT = "<|begin_of_text|>Hello 123  wörld 👍<|eot_id|>"
    SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")

    def reference(self):
        """A tokenizer.json of Llama 3's kind."""
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        words = ("Hello", " Hello", "123", "12", " w", "rld", "  w", " 1")
        backend = byte_level_tokenizer(words=words, special=self.SPECIAL, bos=self.SPECIAL[0])
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return backend

    def metadata(self, backend):
        model = json.loads(backend.to_str())["model"]
        size = backend.get_vocab_size()
        return {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": [backend.id_to_token(i) for i in range(size)],
            "tokenizer.ggml.token_type": [3 if backend.id_to_token(i) in self.SPECIAL else 1 for i in range(size)],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
            "tokenizer.ggml.bos_token_id": backend.token_to_id("<|begin_of_text|>"),
            "tokenizer.ggml.eos_token_id": backend.token_to_id("<|end_of_text|>"),
            "tokenizer.ggml.eot_token_id": backend.token_to_id("<|eot_id|>"),
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}<|eot_id|>",
        }

    @pytest.fixture
    def folder(self, tmp_path):
        from corogen.model.gguf_config import Metadata
        from corogen.model.gguf_tokenizer import generation_config, tokenizer_files

        metadata = Metadata(self.metadata(self.reference()))
        for name, content in tokenizer_files(metadata).items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config(metadata)))
        return tmp_path

    def test_ids_equal_those_of_tokenizer_json(self, folder):
        ours, theirs = Tokenizer.from_folder(folder), Tokenizer(self.reference())
        for text in (self.TEXT, "Hello 123  wörld 👍", "", " x\n\n12345"):
            assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(self.TEXT)
        assert ids[0] == ours.token_id("<|begin_of_text|>") == ours.bos_id
        assert ids[-1] == ours.token_id("<|eot_id|>")
        assert ids.count(ours.bos_id) == 1
        assert ours.decode(ids, skip_special_tokens=False) == self.TEXT

    def test_template_and_end_tokens_come_from_the_metadata(self, folder):
        admission = load(folder)
        tokenizer = admission.tokenizer
        ids = admission.prepare("Hello").prompt_ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin_of_text|>Hello<|eot_id|>"
        ends = {tokenizer.token_id("<|end_of_text|>"), tokenizer.token_id("<|eot_id|>")}
        assert admission.facts.eos_ids == ends
