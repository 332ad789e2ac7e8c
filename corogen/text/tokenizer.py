"""Text to token ids and back: `Tokenizer`, a thread-safe wrapper of `tokenizers.Tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from corogen.errors import PromptTooLong, TokenizerError, a_type_of
from corogen.text.detokenize import PieceTable, TextStream, WindowStream, join, scheme_of

#: files from one of which a tokenizer can be made when there is no tokenizer.json
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model", "*.tiktoken")

#: characters from which on it matters that a text is encoded without holding up other threads
_LONG_TEXT = 8_000


class Tokenizer:
    """A model's tokenizer. Safe to use from any number of threads: nothing in it changes after it was made.

    Attributes:
        backend: the `tokenizers.Tokenizer`. Truncation and padding are off and must stay off.
        special_tokens: what tokenizer_config.json names, such as {"bos_token": "<s>", "eos_token": "</s>"}.
        added_tokens: text -> id of every token that is matched in text as a whole, special or not.
        vocab_size: one more than the largest id.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any] | None = None) -> None:
        # set once, here: changing these while another thread encodes is an error in `tokenizers`
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = _named_tokens(config or {})
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self._special = frozenset(token.content for token in added.values() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._scheme = scheme_of(backend)
        self._tables: dict[bool, PieceTable] = {}
        self._set_bos((config or {}).get("add_bos_token"))

    def _set_bos(self, wanted: bool | None) -> None:
        """Find out what is put before a text. `add_bos_token` of tokenizer_config.json overrules tokenizer.json."""
        prefix = self.backend.encode("").ids[:1]
        named = self.token_id(self.bos_token)
        self._backend_adds = bool(prefix) and named in (None, prefix[0])
        known = prefix[0] if self._backend_adds else named
        adds = self._backend_adds if wanted is None else bool(wanted)
        self._bos_id = known if adds else None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder: tokenizer.json, else whatever `transformers` can turn into one (slow).

        Raises:
            TokenizerError: naming the folder and what to do.
        """
        folder = Path(folder)
        config = _read_config(folder)
        if (folder / "tokenizer.json").is_file():
            return cls(_read_backend(folder / "tokenizer.json"), config)
        if not any(next(folder.glob(pattern), None) for pattern in _OTHER_FILES):
            raise TokenizerError(
                f"{folder} has no tokenizer: put the tokenizer.json of the model there "
                "(transformers.AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes it)"
            )
        return cls(_convert(folder), config)

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a sequence, if the tokenizer names one."""
        return self.special_tokens.get("bos_token")

    @property
    def bos_id(self) -> int | None:
        """The id that `encode` puts before a raw text; None if it puts none."""
        return self._bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end token that tokenizer_config.json names, if it does."""
        eos = self.token_id(self.special_tokens.get("eos_token"))
        return frozenset() if eos is None else frozenset([eos])

    def token_id(self, token: str | None) -> int | None:
        """The id of a token by its text; None for one that there is not."""
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of a text.

        With `add_special_tokens` (raw text) there is one BOS in front if the tokenizer uses one, and no second when
        the text begins with it already. A rendered chat has its BOS from the template: encode it without.

        Raises:
            PromptTooLong: there are more than twice `limit`, found before a list is made of them, in which time no
                other thread would run.
        """
        if not add_special_tokens or (self._bos_id is None and self._backend_adds):
            return self._ids(text, False, limit)
        ids = self._ids(text, True, limit)
        bos = self._bos_id
        if bos is None:
            return ids
        if self._backend_adds:
            return ids[1:] if ids[1:2] == [bos] else ids
        return ids if ids[:1] == [bos] else [bos, *ids]

    def _ids(self, text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        """For a long text by way of a batch: that computes no offsets and lets other threads run; `encode` does not."""
        if len(text) < _LONG_TEXT:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if limit is not None and len(encoding) > 2 * limit:
            raise PromptTooLong(len(encoding), limit)
        return list(encoding.ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; an id that the tokenizer does not know is no text. Equals the joined pieces of a stream.

        Raises nothing. Broken UTF-8 shows as U+FFFD.
        """
        return join(self.text_stream(skip_special_tokens), ids)

    def text_stream(self, skip_special_tokens: bool) -> TextStream:
        """A new incremental decoder; `corogen.text.detokenize.Detokenizer` is its public face."""
        if self._scheme is None:
            return WindowStream(self.backend, skip_special_tokens)
        table = self._tables.get(skip_special_tokens)
        if table is None:  # two threads may both make one; either will do
            skipped = self._special if skip_special_tokens else frozenset()
            table = self._tables[skip_special_tokens] = PieceTable(self.backend, self._scheme, skipped)
        return table.stream()


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The `..._token` entries of tokenizer_config.json, each a string or a dict with "content"."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; {} when there is neither."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise TokenizerError(f"{path} can not be read: {error}; download it again") from error
        if not isinstance(data, dict):
            raise TokenizerError(f"{path} must hold a JSON object, not {a_type_of(data)}; download it again")
        merged.update({key: value for key, value in data.items() if value is not None})
    return merged


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare exceptions
        raise TokenizerError(f"{path} can not be read: {error}; download it again") from error


def _convert(folder: Path) -> Backend:
    """By way of `transformers`, whose import takes seconds."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise TokenizerError(
            f"transformers can not make a tokenizer of the files in {folder}: {error}. Put a tokenizer.json there"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise TokenizerError(
            f"the tokenizer in {folder} ({type(loaded).__name__}) is a slow one without a tokenizer.json; convert it"
        )
    return backend
