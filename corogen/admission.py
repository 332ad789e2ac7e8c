"""What a caller passes becomes a checked, immutable `Request`, or an error that says what is wrong with it."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from corogen.config import EngineConfig
from corogen.errors import (
    ChatTemplateError,
    CheckpointError,
    ConfigError,
    EmptyPrompt,
    InvalidRequest,
    PromptTooLong,
    TokenOutOfRange,
    a_type_of,
)
from corogen.params import MODEL_DEFAULTS, GenerationConfig, ModelFacts, StopRule, check_fields, resolve
from corogen.text.chat import ChatTemplate
from corogen.text.tokenizer import Tokenizer
from corogen.wire.messages import Sampling

logger = logging.getLogger("corogen")

#: characters from which on tokenising takes long enough to be worth a thread
LONG_TEXT = 8_000

_counter = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Request:
    """One checked request; nothing about it changes any more."""

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    stop: StopRule
    max_new_tokens: int
    skip_special_tokens: bool
    #: lower runs first
    priority: int
    #: seconds from arrival until it must be complete, and until it must first run
    timeout_s: float | None
    queue_timeout_s: float | None
    #: `time.monotonic()` of its admission
    arrival: float


class TextFiles(NamedTuple):
    """What of a model folder can be read before the model is loaded."""

    folder: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def read(cls, folder: Path, config: EngineConfig) -> TextFiles:
        """Read them.

        Raises:
            TokenizerError: no tokenizer, or a broken one.
            ConfigError: `config.chat_template` names no usable file.
        """
        tokenizer = Tokenizer.from_folder(folder)
        return cls(folder, tokenizer, ChatTemplate.from_folder(folder, config.chat_template, tokenizer.special_tokens))


class Admission:
    """Checks prompts and settings against one model. Pure, and safe to use from several threads.

    A prompt is a string (one user message if the model has a chat template, else raw text), a list of messages (a
    chat), or a list of token ids (taken as they are).
    """

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None, facts: ModelFacts) -> None:
        self.tokenizer, self.template, self.facts = tokenizer, template, facts

    @classmethod
    def from_folder(cls, folder: Path, config: EngineConfig, *, max_len: int, vocab_size: int) -> Admission:
        """Read everything that it needs from a model folder. Raises what `TextFiles.read` and `from_files` raise."""
        return cls.from_files(TextFiles.read(Path(folder), config), config, max_len=max_len, vocab_size=vocab_size)

    @classmethod
    def from_files(cls, files: TextFiles, config: EngineConfig, *, max_len: int, vocab_size: int) -> Admission:
        """Read end tokens and sampling defaults, now that the loaded model's sizes are known.

        Raises:
            CheckpointError: config.json or generation_config.json can not be read.
            ConfigError: `config.generation_config` names no usable file.
        """
        folder, tokenizer, template = files
        _warn_of_what_is_missing(folder, tokenizer, template, vocab_size)
        return cls(tokenizer, template, _facts(folder, config, tokenizer, max_len, vocab_size))

    def prepare(
        self,
        prompt: Any,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        request_id: str | None = None,
    ) -> Request:
        """Check everything and return the request. With `do_preprocess=False` a string is raw text.

        Raises:
            InvalidRequest: or one of its subclasses, naming the value at fault and the remedy.
        """
        arrival = time.monotonic()
        ids = self._prompt_ids(prompt, do_preprocess)
        if len(ids) >= self.facts.max_len:
            raise PromptTooLong(len(ids), self.facts.max_len)
        resolved = resolve(gen_config, len(ids), self.facts)
        return Request(
            id=f"r{next(_counter)}" if request_id is None else request_id,
            prompt_ids=ids,
            sampling=resolved.sampling,
            stop=resolved.stop,
            max_new_tokens=resolved.max_new_tokens,
            skip_special_tokens=resolved.skip_special_tokens,
            priority=resolved.priority,
            timeout_s=resolved.timeout_s,
            queue_timeout_s=resolved.queue_timeout_s,
            arrival=arrival,
        )

    def is_long(self, prompt: Any) -> bool:
        """Whether turning this prompt into token ids takes so long that a thread should do it."""
        if isinstance(prompt, str):
            return len(prompt) > LONG_TEXT
        if not isinstance(prompt, list | tuple) or not prompt or isinstance(prompt[0], int):
            return False
        return sum(_text_length(message) for message in prompt) > LONG_TEXT

    def _prompt_ids(self, prompt: Any, do_preprocess: bool) -> list[int]:
        kind = prompt_kind(prompt)
        if kind == "ids":
            return self._checked_ids(list(prompt))
        if kind == "chat":
            if not do_preprocess:
                raise InvalidRequest(
                    "do_preprocess=False means raw text, and this prompt is a list of messages: pass a string",
                    param="do_preprocess",
                )
            return self.chat_ids(list(prompt))
        if do_preprocess and self.template is not None:
            if not prompt:
                raise EmptyPrompt("the prompt is an empty string: there is nothing to answer", param="prompt")
            return self.chat_ids([{"role": "user", "content": prompt}])
        return self._encode_raw(prompt)

    def _encode_raw(self, text: str) -> list[int]:
        ids = self._encode(text, add_special_tokens=True)
        if not ids:
            raise EmptyPrompt(
                "the prompt has no tokens, and this model's tokenizer puts none in front: pass some text",
                param="prompt",
            )
        return ids

    def chat_ids(self, messages: list[Any]) -> list[int]:
        """Token ids of a chat as the model is asked it. Raises InvalidRequest."""
        if self.template is None:
            raise ChatTemplateError(
                "the model has no chat template, so a list of messages has no meaning to it: set chat_template in "
                "EngineConfig to a Jinja file or text, or pass the prompt as a string",
                param="messages",
            )
        ids = self._encode(self.template.render(messages), add_special_tokens=False)
        if not ids:
            raise EmptyPrompt("the chat template made no tokens of these messages", param="messages")
        return ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequest("there is no tokenizer here: pass the prompt as a list of token ids", param="prompt")
        refuse_surrogates(text)
        # a tokenizer may know more tokens than the model embeds
        limit = self.facts.max_len
        return self._checked_range(self.tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=limit))

    def _checked_ids(self, ids: list[Any]) -> list[int]:
        if len(ids) >= self.facts.max_len:  # before each is looked at
            raise PromptTooLong(len(ids), self.facts.max_len)
        for position, token_id in enumerate(ids) if set(map(type, ids)) != {int} else ():
            if type(token_id) is not int:
                raise InvalidRequest(
                    f"prompt[{position}] is {token_id!r}; a prompt of token ids holds whole numbers", param="prompt"
                )
        return self._checked_range(ids)

    def _checked_range(self, ids: list[int]) -> list[int]:
        size = self.facts.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            position, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < size)
            raise TokenOutOfRange(
                f"token {position} of the prompt is {token_id}; token ids of this model run from 0 to {size - 1}",
                param="prompt",
            )
        return ids


def is_batch(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts; False for one prompt.

    One prompt is a string, a list of messages or a list of token ids. A list of such is a batch, mixed or not, and so
    is an empty list.

    Raises:
        InvalidRequest: it is neither, naming the type.
    """
    if isinstance(prompts, list | tuple) and not prompts:
        return True
    return _list_kind(prompts) == "batch"


def prompt_kind(prompt: Any) -> str:
    """What one prompt is: "text", "chat" or "ids".

    Raises:
        EmptyPrompt: an empty list.
        InvalidRequest: it is none of these.
    """
    if isinstance(prompt, list | tuple) and not prompt:
        raise EmptyPrompt("the prompt is an empty list: pass at least one message or token id", param="prompt")
    kind = _list_kind(prompt)
    if kind == "batch":
        raise InvalidRequest("this is a list of prompts where one prompt is wanted", param="prompt")
    return kind


def _list_kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list | tuple):
        hint = ": put the message into a list" if isinstance(value, Mapping) else ""
        hint = ": call its tolist()" if hasattr(value, "tolist") else hint
        raise InvalidRequest(f"a prompt is {_KINDS}, not {a_type_of(value)}{hint}", param="prompt")
    first = _item_kind(value[0], 0)
    if first == "chat" and any(isinstance(item, str | list | tuple) for item in value):
        raise InvalidRequest("the list holds messages and something else: a chat is a list of messages", param="prompt")
    for position, item in enumerate(value) if first == "batch" else ():
        if _item_kind(item, position) != "batch":
            raise InvalidRequest(
                f"item {position} of the list of prompts is {a_type_of(item)}; a prompt is {_KINDS}",
                param="prompt",
            )
    return first


_KINDS = "a string, a list of messages or a list of token ids"


def _item_kind(item: Any, position: int) -> str:
    """What a list with this item is."""
    if isinstance(item, str | list | tuple):
        return "batch"
    if isinstance(item, Mapping) or hasattr(item, "role"):
        return "chat"
    if isinstance(item, int | float) or hasattr(item, "__index__"):
        return "ids"
    raise InvalidRequest(f"item {position} is {a_type_of(item)}; a prompt is {_KINDS}", param="prompt")


def _text_length(value: Any, depth: int = 5) -> int:
    """Characters of all texts in a message: in its parts, its calls of tools and their arguments."""
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(_text_length(item, depth - 1) for item in items) if depth else LONG_TEXT


def refuse_surrogates(text: str) -> None:
    """Raise InvalidRequest if `text` holds half of a pair of code units, which no tokenizer can read."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"character {error.start} of the prompt is the lone surrogate {text[error.start]!a}, which is no text: "
            'clean it with text.encode("utf-8", "replace").decode()',
            param="prompt",
        ) from None


# -- what the model's own files say


def _warn_of_what_is_missing(
    folder: Path, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> None:
    if template is None:
        logger.warning(
            "%s has no chat template: a prompt string is taken as raw text, and lists of messages are refused; "
            "chat_template in EngineConfig supplies one",
            folder,
        )
    if tokenizer.vocab_size > vocab_size:
        logger.warning(
            "the tokenizer of %s has %d tokens and the model embeds %d: prompts that use the rest are refused",
            folder,
            tokenizer.vocab_size,
            vocab_size,
        )


def _facts(folder: Path, config: EngineConfig, tokenizer: Tokenizer, max_len: int, vocab_size: int) -> ModelFacts:
    model = {**_read_json(folder / "config.json"), **(config.hf_overrides or {})}
    own, chosen = _read_json(folder / "generation_config.json"), {}
    path = folder / "generation_config.json"
    if config.generation_config == "auto":
        chosen = own
    elif config.generation_config != "none":
        path, chosen = _read_chosen(config.generation_config)
    eos = set(tokenizer.eos_ids)
    for source in (model, model.get("text_config"), own, chosen):
        eos |= _end_tokens(source)
    return ModelFacts(
        max_len=max_len,
        vocab_size=vocab_size,
        eos_ids=frozenset(i for i in eos if 0 <= i < vocab_size),
        defaults=_sampling_defaults(path, chosen, vocab_size),
        samples=chosen.get("do_sample") is True,
        added_tokens={text: i for text, i in tokenizer.added_tokens.items() if i < vocab_size},
    )


def _end_tokens(source: Any) -> set[int]:
    value = source.get("eos_token_id") if isinstance(source, Mapping) else None
    ids: Sequence[Any] = value if isinstance(value, list) else [value]
    return {i for i in ids if type(i) is int}


def _sampling_defaults(path: Path, source: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The settings in a generation_config.json that count for requests that sample; what is unusable is left out."""
    found = {name: source[name] for name in MODEL_DEFAULTS if source.get(name) is not None}
    for name in list(found):
        try:
            check_fields({name: found[name]}, vocab_size)
        except InvalidRequest as error:
            logger.warning("%s: %s; the default is used instead", path, error)
            del found[name]
    if found:
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        logger.info("requests that sample use the defaults in %s: %s", path, shown)
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can not be read: {error}; download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {a_type_of(data)}; download it again")
    return data


def _read_chosen(setting: str) -> tuple[Path, dict[str, Any]]:
    """The file that `EngineConfig.generation_config` names, or the generation_config.json of the folder it names."""
    try:
        path = Path(setting).expanduser()
        path = path / "generation_config.json" if path.is_dir() else path
        found = path.is_file()
    except (OSError, RuntimeError, ValueError):  # too long, or the home of an unknown user
        found = False
    if not found:
        raise ConfigError(f'generation_config={setting!r}: there is no such file; give "auto", "none" or a JSON file')
    try:
        return path, _read_json(path)
    except CheckpointError as error:
        raise ConfigError(f"generation_config={setting!r}: {error}") from error
