"""Chat templates render as transformers renders them, and refuse in words a caller can use."""

import json

import pytest

from corogen.errors import ChatTemplateError, ConfigError, InvalidRequest, TokenizerError, UnsupportedFeature
from corogen.testing.tokenizers import byte_level_tokenizer, save_tokenizer
from corogen.text.chat import ChatTemplate

TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}

# The shapes of real models' templates, written for these tests.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- set ns = namespace(turns=0) %}
{#- a comment #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}
        {%- continue %}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {{- {"name": message.tool_calls[0].function.name, "q": "<é>"} | tojson }}
    {%- else %}
        {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
{{- ns.turns }}
"""
INST = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{% endfor %}"""
TOOLS = """{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" + tool | tojson(indent=2) }}
    {%- endfor %}
    {{- '</tools>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.content is string %}
        {{- m.role ~ ':' ~ m.content ~ '\\n' }}
    {%- else %}
        {%- for part in m.content %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- call.function.name ~ call.function.arguments }}
    {%- endfor %}
{%- endfor %}"""

USER = [{"role": "user", "content": "Hi <b>&\nthere"}]
CHAT = [*USER, {"role": "assistant", "content": " Hello é. "}, {"role": "user", "content": "More?"}]
SYSTEM = [{"role": "system", "content": "Be short. "}, *CHAT]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
CALLED = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "17.5"},
]
TOOL = {"type": "function", "function": {"name": "look", "description": "é <b>", "parameters": {}}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """transformers' own rendering."""
    from transformers import AutoTokenizer

    tokens = [*TOKENS.values(), "<|im_start|>", "<|im_end|>"]
    folder = save_tokenizer(byte_level_tokenizer(special=tokens), tmp_path_factory.mktemp("tokenizer"), **TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(template, messages, **options):
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)

    return render


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (CHATML, USER, {}),
        (CHATML, SYSTEM, {}),
        (HEADERS, CHAT, {}),
        (HEADERS, [*SYSTEM, {"role": "skip", "content": ""}], {"date_string": "1 Dec 2026"}),
        (HEADERS, CALLED, {}),
        (INST, CHAT, {}),
        (TOOLS, CHAT, {"tools": [TOOL]}),
        (TOOLS, [*CALLED[:1], *CALLED[2:]], {"tools": [TOOL, TOOL]}),
        (TOOLS, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    ],
)
def test_renders_as_transformers_does(reference, template, messages, options, prompt):
    ours = ChatTemplate(template, TOKENS).render(messages, add_generation_prompt=prompt, **options)
    assert ours == reference(template, messages, add_generation_prompt=prompt, **options)


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_reaches_the_template_under_each_of_its_names(name):
    """As in newer versions of transformers."""
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}"
    messages = [{"role": "assistant", "content": "x", name: "because"}]
    assert ChatTemplate(template).render(messages) == "because|because;"


def test_a_refusal_comes_with_the_templates_own_words():
    with pytest.raises(ChatTemplateError, match="Roles must alternate user/assistant") as caught:
        ChatTemplate(INST, TOKENS).render(SYSTEM)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].nothing.at.all }}", "has no attribute 'nothing'"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__init__=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_whatever_a_template_raises_is_a_chat_template_error(template, words):
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(template).render(USER)


def test_a_content_of_none_is_never_written_out():
    silent = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    for template in (CHATML, "{% for m in messages %}{{ m.content }}|{% endfor %}", HEADERS):
        assert "None" not in ChatTemplate(template, TOKENS).render(silent)
    assert ChatTemplate("{% for m in messages %}{{ 'x' + m.content }}|{% endfor %}").render(silent)[-3:] == "|x|"


PARTS = [{"role": "user", "content": [{"type": "text", "text": "Explain "}, {"type": "text", "text": "RoPE"}]}]
WHOLE = [{"role": "user", "content": "Explain RoPE"}]


def test_text_parts_are_joined_for_a_template_of_strings():
    for template in (CHATML, INST, "{{ 'x' + messages[0].content }}"):
        rendered = ChatTemplate(template, TOKENS).render(PARTS)
        assert rendered == ChatTemplate(template, TOKENS).render(WHOLE)


@pytest.mark.parametrize(
    "parts", ["m['content']", "m.content", "m['content'] | selectattr('type', 'equalto', 'text') | list"]
)
def test_a_string_becomes_a_part_for_a_template_of_parts(parts):
    template = ChatTemplate("{% for m in messages %}{% for p in " + parts + " %}({{ p.text }}){% endfor %}{% endfor %}")
    assert template.render(PARTS) == "(Explain )(RoPE)"
    assert template.render(WHOLE) == "(Explain RoPE)"


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        ("hi", InvalidRequest, r"messages\[1\] must be a dict .* not a str"),
        ({"content": "hi"}, InvalidRequest, r"messages\[1\] has no role"),
        ({"role": 3, "content": "hi"}, InvalidRequest, "role 3"),
        ({"role": "", "content": "hi"}, InvalidRequest, r"messages\[1\] has no role"),
        ({"role": "user"}, InvalidRequest, r"messages\[1\] has no content"),
        ({"role": "user", "content": None}, InvalidRequest, r"messages\[1\] has no content"),
        ({"role": "user", "content": 3}, InvalidRequest, "content must be .* not an int"),
        ({"role": "user", "content": ["hi"]}, InvalidRequest, r"content\[0\] must be a dict"),
        ({"role": "user", "content": [{"text": "hi"}]}, InvalidRequest, r"content\[0\]"),
        ({"role": "user", "content": [{"type": "text"}]}, InvalidRequest, r"content\[0\] has no text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, UnsupportedFeature, "image_url"),
    ],
)
def test_what_is_no_message_is_refused_by_name(message, error, words):
    with pytest.raises(error, match=words):
        ChatTemplate(CHATML).render([*USER, message])


def test_message_objects_count_as_dicts():
    from dataclasses import dataclass

    @dataclass
    class Message:
        role: str
        content: str

    assert ChatTemplate(CHATML).render([Message(**USER[0])]) == ChatTemplate(CHATML).render(USER)


def test_templates_see_plain_data_only():
    class Sly(str):
        def steal(self):
            return "stolen"

    template = ChatTemplate("{{ messages[0].content.steal is defined }}{{ thing }}")
    assert template.render([{"role": "user", "content": Sly("x")}], thing=object()) == "False<object>"


def test_the_callers_messages_stay_as_they_are():
    messages = json.loads(json.dumps(CALLED))
    ChatTemplate(HEADERS, TOKENS).render(messages)
    assert messages == CALLED


class TestSources:
    def config(self, folder, **entries):
        (folder / "tokenizer_config.json").write_text(json.dumps(entries))
        return folder

    def test_none_when_the_folder_has_none(self, tmp_path):
        assert ChatTemplate.from_folder(tmp_path) is None
        assert ChatTemplate.from_folder(self.config(tmp_path, chat_template=None)) is None

    def test_a_string_in_tokenizer_config(self, tmp_path):
        template = ChatTemplate.from_folder(self.config(tmp_path, chat_template="one"))
        assert template.render(USER) == "one"

    def test_a_list_of_named_ones(self, tmp_path):
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        template = ChatTemplate.from_folder(self.config(tmp_path, chat_template=named))
        assert template.render(USER) == "plain"
        assert template.render(USER, tools=[TOOL]) == "tools"

    def test_named_ones_without_a_default(self, tmp_path):
        template = ChatTemplate.from_folder(self.config(tmp_path, chat_template=[{"name": "rag", "template": "x"}]))
        with pytest.raises(ChatTemplateError, match="rag"):
            template.render(USER)

    def test_files_go_before_tokenizer_config(self, tmp_path):
        self.config(tmp_path, chat_template="old")
        (tmp_path / "chat_template.jinja").write_text("file")
        (tmp_path / "chat_templates").mkdir()
        (tmp_path / "chat_templates" / "tool_use.jinja").write_text("tool file")
        template = ChatTemplate.from_folder(tmp_path)
        assert (template.render(USER), template.render(USER, tools=[TOOL])) == ("file", "tool file")

    def test_an_override_is_a_path_or_the_text(self, tmp_path):
        (tmp_path / "mine.jinja").write_text("{{ bos_token }}mine")
        for override in (str(tmp_path / "mine.jinja"), "{{ bos_token }}mine"):
            assert ChatTemplate.from_folder(tmp_path, override, TOKENS).render(USER) == "<|bos|>mine"

    @pytest.mark.parametrize("override", ["no/such/file.jinja", "{% if %}"])
    def test_a_bad_override_is_named_at_load(self, tmp_path, override):
        with pytest.raises(ConfigError, match="chat_template="):
            ChatTemplate.from_folder(tmp_path, override)

    @pytest.mark.parametrize("value", [3, [3], [{"name": "x"}]])
    def test_a_broken_entry_is_named(self, tmp_path, value):
        with pytest.raises(TokenizerError, match="chat_template"):
            ChatTemplate.from_folder(self.config(tmp_path, chat_template=value))
