"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from corogen.errors import TokenizerError
from corogen.model.gguf_config import Metadata

#: tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: tokenizer.ggml.pre -> how text is cut into words: a pattern, "digits" (single digits, then GPT-2's), or GPT-2's
_PRE: dict[str, str] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "olmo", "phi-2", "jina-es", "jina-de"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3"), _WORDS_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _WORDS_QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _WORDS_GPT4O),
}
#: files of these begin every text with the begin token and take whole words of the vocabulary before any merge
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3")

#: texts of tokens that end a turn, for files that name the end of text only
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|end_of_text|>", "<EOT>")

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_files(metadata: Metadata) -> dict[str, Any]:
    """{file name: text or JSON value} of the tokenizer; nothing when the file holds none.

    Raises:
        TokenizerError: a kind of tokenizer that would be rebuilt wrongly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return {}
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in makers:
        raise TokenizerError(f"tokenizers of the kind {kind!r} can not be read from a GGUF file; put a tokenizer.json")
    tokenizer = makers[kind](metadata)
    _add_special(tokenizer, metadata)
    if _adds_bos(metadata):
        _prepend_bos(tokenizer, metadata)
    return {"tokenizer.json": tokenizer.to_str(pretty=False), "tokenizer_config.json": _config(metadata)}


def _tokens(metadata: Metadata) -> list[str]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return tokens


def _byte_level(metadata: Metadata) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise TokenizerError(f"the word splitting {pre!r} of this GGUF file is unknown; put the model's tokenizer.json")
    merges = [tuple(line.split(" ", 1)) for line in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(_tokens(metadata))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    byte_level = pre_tokenizers.ByteLevel
    if _PRE[pre] == "gpt2":
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    elif _PRE[pre] == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        words = pre_tokenizers.Split(Regex(_PRE[pre]), behavior="isolated")
        steps = [words, byte_level(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if _PRE[pre] == _WORDS_QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Metadata) -> Tokenizer:
    """Pieces with scores become merges: the better the whole piece, the earlier its halves are joined."""
    tokens, scores = _tokens(metadata), metadata["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocab, merges=_merges(vocab, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    ends = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    ranked = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], i, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_special(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Control tokens are special; what the user defined is matched whole, but shown."""
    tokens = _tokens(metadata)
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    shown = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in shown])


def _adds_bos(metadata: Metadata) -> bool:
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    wanted = metadata.get("tokenizer.ggml.add_bos_token", default)
    return bool(wanted) and metadata.get("tokenizer.ggml.bos_token_id") is not None


def _prepend_bos(tokenizer: Tokenizer, metadata: Metadata) -> None:
    token_id = metadata["tokenizer.ggml.bos_token_id"]
    bos = _tokens(metadata)[token_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, token_id)]
    )


def _config(metadata: Metadata) -> dict[str, Any]:
    tokens = _tokens(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(metadata),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.own("context_length", 1 << 30),
    }
    for name, key in _NAMED.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    template = _chat_template(metadata)
    return config if template is None else {**config, "chat_template": template}


def _chat_template(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """One template as its text, several as transformers lists them."""
    default = metadata.get("tokenizer.chat_template")
    others = metadata.named("tokenizer.chat_template.")
    if not others:
        return default if isinstance(default, str) else None
    named = {**({"default": default} if default else {}), **others}
    return [{"name": name, "template": text} for name, text in named.items()]


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """End tokens from the metadata: end of text, end of turn and end of message, named or known by their text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    ends += [
        i
        for i, (t, kind) in enumerate(zip(tokens, kinds, strict=False))
        if t in _END_OF_TURN and kind in (_CONTROL, _USER_DEFINED)
    ]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(e for e in ends if e is not None))}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if metadata.get(f"tokenizer.ggml.{key}") is not None:
            found[name] = metadata.get(f"tokenizer.ggml.{key}")
    return found
