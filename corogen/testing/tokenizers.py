"""Small tokenizers of the two kinds that models use, made in a millisecond, for tests without downloads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from corogen.text.detokenize import byte_alphabet

#: words that are tokens unless a test names its own
WORDS = ("the", "and", " the", " world", "hello", "Hello", "\n\n", "?\n", "  ", "12", "é", "你好")


def byte_level_tokenizer(
    words: Sequence[str] = WORDS, *, special: Sequence[str] = ("<|bos|>", "<|eos|>"), bos: str | None = None
) -> Tokenizer:
    """Byte-level BPE: all 256 bytes, `words` (which may hold any text), then the special tokens.

    Most non-ASCII characters take several tokens. With `bos`, encoding puts that token in front.
    """
    letters = {byte: char for char, byte in byte_alphabet().items()}
    spelled = ["".join(letters[byte] for byte in word.encode()) for word in words]
    vocab, merges = _bpe([letters[byte] for byte in range(256)], spelled)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if bos is not None:
        _prepend(tokenizer, bos)
    return tokenizer


def sentencepiece_tokenizer(
    words: Sequence[str] = ("▁the", "▁Hello", "▁world", "Hello", "ing"), *, bos: bool = True
) -> Tokenizer:
    """Llama 2's kind: '▁' for a space, <0xNN> tokens for characters that are no token, <s> in front of a text."""
    base = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "\n"]
    base += [chr(code) for code in range(0x21, 0x7F)]
    vocab, merges = _bpe(base, words)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    if bos:
        _prepend(tokenizer, "<s>")
    return tokenizer


def _bpe(base: Iterable[str], words: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges by which each word is built up from its first letter."""
    vocab = {token: i for i, token in enumerate(dict.fromkeys(base))}
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(1, len(word)):
            for token in (word[:end], word[end], word[: end + 1]):
                vocab.setdefault(token, len(vocab))
            merge = (word[:end], word[end])
            if merge not in merges:
                merges.append(merge)
    return vocab, merges


def _prepend(tokenizer: Tokenizer, bos: str) -> None:
    ids = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json (with the entries of `config`) into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def ids_of(tokenizer: Tokenizer, tokens: Iterable[str]) -> list[int]:
    """The ids of tokens given by their text ('▁Hello', '<0xE4>'), or for byte-level tokenizers by what they stand for.

    Raises:
        KeyError: for a token that there is not.
    """
    letters = {byte: char for char, byte in byte_alphabet().items()}
    found = []
    for token in tokens:
        spelled = "".join(letters[byte] for byte in token.encode())
        token_id = tokenizer.token_to_id(token)
        token_id = tokenizer.token_to_id(spelled) if token_id is None else token_id
        if token_id is None:
            raise KeyError(token)
        found.append(token_id)
    return found
