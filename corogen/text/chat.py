"""Messages to prompt text: `ChatTemplate`, Jinja templates as Hugging Face models ship them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from corogen.errors import (
    ChatTemplateError,
    ConfigError,
    InvalidRequest,
    TokenizerError,
    UnsupportedFeature,
    a_type_of,
)

#: names under which callers pass a message's reasoning; templates read the first, or "thinking"
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: a message must have one of these
_SAYING = ("content", "tool_calls", "function_call", *_REASONING)


class ChatTemplate:
    """A model's chat templates, by name. Safe to use from several threads.

    Templates are code from elsewhere: they run in Jinja's immutable sandbox and see plain data only.
    """

    def __init__(self, templates: Mapping[str, str] | str, special_tokens: Mapping[str, str] | None = None) -> None:
        """
        Args:
            templates: one template, or several by name, of which "default" and "tool_use" are chosen by themselves.
            special_tokens: variables for the template, such as {"bos_token": "<s>"}.
        """
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._templates = {name: _Template(source) for name, source in named.items()}
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(
        cls, folder: Path, override: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate | None:
        """The templates of a model folder, or `override`: a Jinja file's path, or the template itself.

        The folder's are chat_template.jinja and chat_templates/NAME.jinja, else the "chat_template" of
        tokenizer_config.json (a string, or a list of named ones). None if there is no template.

        Raises:
            ConfigError: the override is no file and no template.
        """
        if override is not None:
            template = cls(_read_override(override), special_tokens)
            template._check_override(override)
            return template
        found = _template_files(Path(folder)) or _configured_templates(Path(folder))
        return cls(found, special_tokens) if found else None

    def _check_override(self, override: str) -> None:
        try:
            for template in self._templates.values():
                template.compiled  # noqa: B018
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat_template={_short(override)} is no valid Jinja template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for `messages`. Encode it with `add_special_tokens=False`: the template writes the BOS itself.

        A content given as a list of text parts counts as the parts joined without anything between, unless the
        template reads parts. A content of None is left out. `extra` are variables for the template.

        Raises:
            ChatTemplateError: the template refuses, with its own words.
            UnsupportedFeature: a part that is not text.
            InvalidRequest: a message that is none.
        """
        template = self._choose(tools)
        checked = [check_message(message, i) for i, message in enumerate(messages)]
        variables = {**self._special_tokens, "tools": tools, "documents": None, **extra}
        variables["add_generation_prompt"] = add_generation_prompt
        return template.render(checked, {name: plain(value) for name, value in variables.items()})

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> _Template:
        wanted = ("tool_use", "default") if tools else ("default",)
        for name in wanted:
            if name in self._templates:
                return self._templates[name]
        names = ", ".join(sorted(self._templates))
        raise ChatTemplateError(f'the model has chat templates ({names}), none of them "default": set chat_template')


class _Template:
    """One template, compiled when it is first needed: a broken one does not keep a model from being served."""

    def __init__(self, source: str) -> None:
        self._source = source

    @cached_property
    def compiled(self) -> jinja2.Template:
        return _environment().from_string(self._source)

    @cached_property
    def reads_parts(self) -> bool | None:
        """True: content must be a list of parts; False: a string; None: the template takes both."""
        tree = _environment().parse(self._source)
        loops = any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))
        if not loops:
            return False
        return None if any(test.name == "string" for test in tree.find_all(jinja2.nodes.Test)) else True

    def render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            shaped = [_shape(message, self.reads_parts) for message in messages]
            return self._render(shaped, variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses the messages: {error}", param="messages") from error
        except Exception as error:  # a template can raise anything: it is code
            raise ChatTemplateError(
                f"the chat template fails on the messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        try:
            return self.compiled.render(messages=messages, **variables)
        except jinja2.UndefinedError:
            if all("content" in message for message in messages):
                raise
        # "prefix" + message.content, for a message that calls tools and says nothing
        return self.compiled.render(messages=[{"content": "", **message} for message in messages], **variables)


def check_message(message: Any, position: int) -> dict[str, Any]:
    """A message as plain data without its None entries.

    Raises:
        InvalidRequest: it is no dict, has no role, has nothing to say, or a content of a wrong type.
        UnsupportedFeature: a content part that is not text.
    """
    where = f"messages[{position}]"
    data = _as_dict(message)
    if data is None:
        raise InvalidRequest(
            f"{where} must be a dict with role and content, not {a_type_of(message)}", param="messages"
        )
    role = data.get("role")
    if not isinstance(role, str) or not role:
        has = "has no role" if role is None or role == "" else f"has the role {role!r}, which is no string"
        raise InvalidRequest(f'{where} {has}: give it one, such as "user"', param="messages")
    if all(data.get(name) is None for name in _SAYING):
        raise InvalidRequest(f"{where} has no content (and no tool_calls): give it a text", param="messages")
    _check_content(data.get("content"), where)
    return _with_reasoning({name: plain(value) for name, value in data.items() if value is not None})


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{where}: content must be a string or a list of parts, not {a_type_of(content)}", param="messages"
        )
    for i, part in enumerate(content):
        data = _as_dict(part)
        kind = None if data is None else data.get("type")
        if not isinstance(kind, str):
            raise InvalidRequest(f'{where}: content[{i}] must be a dict with a "type"', param="messages")
        if data is None or kind != "text":
            raise UnsupportedFeature(
                f'{where}: content[{i}] is of type {kind!r}; this model takes "text" parts only', param="messages"
            )
        if not isinstance(data.get("text"), str):
            raise InvalidRequest(f"{where}: content[{i}] has no text", param="messages")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _shape(message: dict[str, Any], reads_parts: bool | None) -> dict[str, Any]:
    """The message with its content as the template wants it."""
    content = message.get("content")
    if isinstance(content, list) and reads_parts is False:
        return {**message, "content": "".join(part["text"] for part in content)}
    if isinstance(content, str) and reads_parts is True:
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def _is_content(node: jinja2.nodes.Node | None) -> bool:
    """Whether an expression is a message's content, or a selection of it."""
    if isinstance(node, jinja2.nodes.Filter):
        return _is_content(node.node)
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name == "content"


def _as_dict(value: Any) -> dict[str, Any] | None:
    """A dict of a mapping, a dataclass object or a pydantic one; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    return dict(dump()) if callable(dump) and not isinstance(value, type) else None


def plain(value: Any) -> Any:
    """`value` out of JSON types alone, so that a template finds no object whose methods do something.

    Raises:
        InvalidRequest: it holds itself, or is nested hundreds of levels deep.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise InvalidRequest("a message holds itself, or is nested too deep", param="prompt") from None


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # a subclass, such as an enum's member
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    data = _as_dict(value)
    return f"<{type(value).__name__}>" if data is None else {_plain(name): _plain(item) for name, item in data.items()}


# -- where templates come from


def _read_override(override: str) -> str:
    if "{%" in override or "{{" in override:
        return override
    try:
        return Path(override).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the home of an unknown user
        raise ConfigError(
            f"chat_template={_short(override)} is neither a readable file ({error}) nor a Jinja template"
        ) from error


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _template_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in sorted(folder.glob("chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def _configured_templates(folder: Path) -> dict[str, str]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        entries = value.items() if isinstance(value, dict) else ((t["name"], t["template"]) for t in value or ())
        return dict(entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(f"the chat_template in {path} can not be read: {error!r}; set chat_template") from error


# -- what templates may use: the same as in transformers


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Dict:
    """`dict(...)` for templates, without the attributes of the real one."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that keeps no underscore names, through which a sandbox could be left."""

    def __init__(*args: Any, **entries: Any) -> None:  # `self` may be an entry
        values = dict(*args[1:], **entries)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can not hold {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    names: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(names)
    return environment
