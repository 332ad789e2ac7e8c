"""Token ids to text, one token at a time, so that the joined pieces equal the decode of all ids.

Nearly every tokenizer's decoder is one of two kinds, and both decode each token on its own:

- *byte level* (GPT-2, Llama 3, Qwen): a token is a run of bytes, and the bytes of all tokens together are UTF-8;
- *byte fallback* (SentencePiece models): a token is text, or the name `<0xNN>` of one byte.

For these a token's piece is looked up in a table and only bytes that do not yet make a character are kept back: a
fraction of a microsecond a token, where `tokenizers.decoders.DecodeStream` needs two. The other decoders go through
`DecodeStream`.
"""

from __future__ import annotations

import contextlib
import json
from codecs import utf_8_decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from corogen.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one growing sequence. Not thread-safe; one a request."""

    __slots__ = ("flush", "push")

    #: takes the next token id and returns the text that is now certain, "" while a character is unfinished
    push: Callable[[int], str]
    #: returns what was kept back, so that all pieces joined are `tokenizer.decode` of all ids
    flush: Callable[[], str]

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        stream = tokenizer.text_stream(skip_special_tokens)
        self.push, self.flush = stream.push, stream.flush


@dataclass(frozen=True)
class Scheme:
    """How a decoder turns tokens into text, for the two kinds that work token by token."""

    byte_level: bool
    #: (old, new) applied to every token
    replacements: tuple[tuple[str, str], ...] = ()
    #: `<0xNN>` names a byte
    byte_fallback: bool = False
    #: this character is dropped up to `strip_count` times at the beginning of the text
    strip: str = ""
    strip_count: int = 0


def scheme_of(backend: Backend) -> Scheme | None:
    """Recognise the decoder of `backend`; None if it is of neither kind."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return Scheme(byte_level=True)
    return _fallback_scheme(state["decoders"] if state["type"] == "Sequence" else [state])


def _fallback_scheme(steps: list[dict[str, Any]]) -> Scheme | None:
    """Replace*, then ByteFallback, Fuse and Strip as far as they are there: what SentencePiece models decode with."""
    kinds = [step["type"] for step in steps]
    count = next((i for i, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    if not all("String" in step["pattern"] for step in steps[:count]):
        return None
    replacements = tuple((step["pattern"]["String"], step["content"]) for step in steps[:count])
    named_bytes, rest = kinds[count : count + 1] == ["ByteFallback"], kinds[count:]
    rest = rest[named_bytes:]
    if rest in ([], ["Fuse"]):
        return Scheme(False, replacements, named_bytes)
    if rest == ["Fuse", "Strip"] and not steps[-1]["stop"]:  # the end of the text is not known while it grows
        return Scheme(False, replacements, named_bytes, strip=steps[-1]["content"], strip_count=steps[-1]["start"])
    return None


class PieceTable(dict[int, str | bytes]):
    """Token id -> its text if that is whole characters, else its bytes; filled as ids turn up.

    An id that the tokenizer does not know, and a special token when they are skipped, is "".
    """

    def __init__(self, backend: Backend, scheme: Scheme, skipped: frozenset[str]) -> None:
        super().__init__()
        self._backend, self._scheme, self._skipped = backend, scheme, skipped

    def __missing__(self, token_id: int) -> str | bytes:
        token = token_of(self._backend, token_id)
        piece = "" if token is None or token in self._skipped else self._piece(token)
        self[token_id] = piece
        return piece

    def _piece(self, token: str) -> str | bytes:
        if self._scheme.byte_level:
            return _text_if_whole(_bytes_of(token))
        for old, new in self._scheme.replacements:
            token = token.replace(old, new)
        byte = _named_byte(token) if self._scheme.byte_fallback else None
        return token if byte is None else byte

    def stream(self) -> TextStream:
        """A decoder of one sequence."""
        return ByteLevelStream(self) if self._scheme.byte_level else ByteFallbackStream(self, self._scheme)


def token_of(backend: Backend, token_id: int) -> str | None:
    """The token with this id; None for every id that the tokenizer does not know, negative and huge ones included."""
    try:
        return backend.id_to_token(token_id)
    except OverflowError:
        return None


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: visible Latin-1 as itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


_ALPHABET = byte_alphabet()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


def _text_if_whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _named_byte(token: str) -> bytes | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


class TextStream:
    """Text of a growing sequence; see `Detokenizer`."""

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is now certain."""
        raise NotImplementedError

    def flush(self) -> str:
        """Return what was kept back."""
        raise NotImplementedError


class ByteLevelStream(TextStream):
    """The bytes of all tokens are one UTF-8 text; a broken sequence shows as U+FFFD once it can not complete."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._pending = b""

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str) and not self._pending:
            return piece
        return self._join(piece)

    def _join(self, piece: str | bytes) -> str:
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        tail, self._pending = self._pending, b""
        return tail.decode(errors="replace")


class ByteFallbackStream(TextStream):
    """Tokens are text, or single bytes that make a character together; each byte that can not shows as one U+FFFD.

    `tokenizers` itself turns a whole run of bytes into U+FFFD when one of them is broken, also characters that came
    before and have been sent long ago. Here they stay.
    """

    __slots__ = ("_pending", "_pieces", "_plain", "_strip", "_strips_left")

    def __init__(self, pieces: PieceTable, scheme: Scheme) -> None:
        self._pieces = pieces
        self._pending = b""
        self._strip, self._strips_left = scheme.strip, scheme.strip_count
        self._plain = not self._strips_left

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._plain and isinstance(piece, str):
            return piece
        return self._join(piece)

    def _join(self, piece: str | bytes) -> str:
        if isinstance(piece, bytes):
            text, self._pending = _decode_run(self._pending + piece)
        elif not piece:
            return ""  # a skipped token does not end a run of bytes
        else:
            text, self._pending = REPLACEMENT * len(self._pending) + piece, b""
        if self._strips_left:
            text = self._strip_start(text)
        self._plain = not self._pending and not self._strips_left
        return text

    def _strip_start(self, text: str) -> str:
        while text and self._strips_left:
            if not text.startswith(self._strip):
                self._strips_left = 0
                break
            text, self._strips_left = text[len(self._strip) :], self._strips_left - 1
        return text

    def flush(self) -> str:
        tail, self._pending = self._pending, b""
        return REPLACEMENT * len(tail)


def _decode_run(data: bytes) -> tuple[str, bytes]:
    """The characters in `data`, U+FFFD for each byte that can belong to none, and the bytes that may still complete."""
    text = ""
    while True:
        try:
            more, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            text += data[: error.start].decode() + REPLACEMENT * (error.end - error.start)
            data = data[error.end :]
        else:
            return text + more, data[used:]


class WindowStream(TextStream):
    """Any other decoder, through `DecodeStream`; from its first error on by decoding the whole sequence again."""

    __slots__ = ("_backend", "_ids", "_sent", "_skip", "_stream")

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend, self._skip = backend, skip_special_tokens
        self._ids: list[int] = []
        self._sent = 0
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        if token_of(self._backend, token_id) is None:
            return ""
        self._ids.append(token_id)
        if self._stream is not None:
            # its errors ("Invalid prefix encountered") are bare exceptions
            with contextlib.suppress(Exception):
                text = self._stream.step(self._backend, token_id) or ""
                self._sent += len(text)
                return text
            self._stream = None
        return self._rest(final=False)

    def _rest(self, *, final: bool) -> str:
        text = self._backend.decode(self._ids, skip_special_tokens=self._skip)
        if not final and text.endswith(REPLACEMENT):
            return ""
        new = text[self._sent :]
        self._sent += len(new)
        return new

    def flush(self) -> str:
        return self._rest(final=True)


def join(stream: TextStream, ids: Iterable[int]) -> str:
    """The text of `ids` from a new stream."""
    return "".join(map(stream.push, ids)) + stream.flush()
