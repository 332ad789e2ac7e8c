"""Joined pieces equal the decode of all ids, whatever the ids and whichever decoder the tokenizer has."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from corogen.testing.tokenizers import byte_level_tokenizer, ids_of, sentencepiece_tokenizer
from corogen.text.detokenize import Detokenizer, scheme_of
from corogen.text.tokenizer import Tokenizer

#: a busy machine is no fault
no_deadline = settings(deadline=None)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE = Tokenizer(byte_level_tokenizer(special=("<|bos|>", "<|eos|>", "<tool é>", "<｜end｜>")))
SPM = Tokenizer(sentencepiece_tokenizer())


def pieces(tokenizer, ids, **options):
    stream = Detokenizer(tokenizer, **options)
    return [*map(stream.push, ids), stream.flush()]


def ids_for(tokenizer):
    """Random ids, and ids of random text (so that whole and broken characters both turn up)."""
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3))
    text = st.text().map(lambda t: tokenizer.encode(t, add_special_tokens=False))
    return st.lists(random_ids | text, max_size=4).map(lambda parts: [i for part in parts for i in part])


@no_deadline
@given(ids=ids_for(BYTE), skip=st.booleans())
def test_byte_level_pieces_join_to_what_tokenizers_decodes(ids, skip):
    expected = BYTE.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(BYTE, ids, skip_special_tokens=skip)) == expected
    assert BYTE.decode(ids, skip_special_tokens=skip) == expected


def _no_run_mixes_whole_and_broken_characters(ids):
    run = b""
    for token in [*(SPM.backend.id_to_token(i) for i in ids), "end"]:
        if token is not None and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
        elif token not in (None, "<unk>", "<s>", "</s>"):
            text = run.decode(errors="replace")
            if REPLACEMENT in text and text.strip(REPLACEMENT):
                return False
            run = b""
    return True


@no_deadline
@given(ids=ids_for(SPM), skip=st.booleans())
def test_byte_fallback_pieces_join_to_the_decode(ids, skip):
    joined = "".join(pieces(SPM, ids, skip_special_tokens=skip))
    assert joined == SPM.decode(ids, skip_special_tokens=skip)


@no_deadline
@given(ids=ids_for(SPM).filter(_no_run_mixes_whole_and_broken_characters))
def test_byte_fallback_equals_tokenizers_unless_a_run_of_bytes_is_partly_broken(ids):
    assert SPM.decode(ids) == SPM.backend.decode(ids, skip_special_tokens=True)


def test_a_whole_character_stays_when_broken_bytes_follow_in_the_same_run():
    ids = ids_of(SPM.backend, ["<0xC3>", "<0xA9>", "<0xE4>", "<0xBD>"])
    assert pieces(SPM, ids) == ["", "é", "", "", REPLACEMENT * 2]
    assert SPM.backend.decode(ids) == REPLACEMENT * 4


@no_deadline
@given(text=st.text())
@example(text="你好，世界 👨‍👩‍👧 é")
@pytest.mark.parametrize("tokenizer", [BYTE, SPM], ids=["byte", "spm"])
def test_no_replacement_character_leaks_from_text_that_has_none(tokenizer, text):
    text = text.replace(REPLACEMENT, "")
    for piece in pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False):
        assert REPLACEMENT not in piece


@pytest.mark.parametrize("tokenizer", [BYTE, SPM], ids=["byte", "spm"])
def test_an_unfinished_character_is_no_text_until_the_end(tokenizer):
    ids = tokenizer.encode("👍", add_special_tokens=False)[-4:]
    stream = Detokenizer(tokenizer)
    assert [stream.push(i) for i in ids[:3]] == ["", "", ""]
    assert stream.flush() == tokenizer.backend.decode(ids[:3])
    assert pieces(tokenizer, ids)[3].strip() == "👍"


def test_a_space_before_the_first_word_is_dropped_once_for_sentencepiece():
    ids = ids_of(SPM.backend, ["<s>", "▁", "▁Hello", "▁world"])
    assert pieces(SPM, ids) == ["", "", " Hello", " world", ""]
    assert "".join(pieces(SPM, ids)) == SPM.backend.decode(ids)


@pytest.mark.parametrize("unknown", [10**6, 2**32, 2**70, -1])
@pytest.mark.parametrize("tokenizer", [BYTE, SPM], ids=["byte", "spm"])
def test_an_id_that_the_tokenizer_does_not_know_is_no_text(tokenizer, unknown):
    ids = tokenizer.encode("Hello", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [ids[0], unknown, *ids[1:]])) == tokenizer.decode(ids)


def _other(decoder):
    backend = Backend(models.WordLevel({"a": 0, "##b": 1, "▁c": 2, ".": 3, "\N{REPLACEMENT CHARACTER}": 4}, "a"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["[E]"])
    return Tokenizer(backend)


OTHERS = {
    "word piece": decoders.WordPiece(),
    "metaspace": decoders.Metaspace(),
    "metaspace in a sequence": decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]),
    "strip at the end": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("a", 0, 1)]),
    "none": None,
}


@pytest.mark.parametrize("name", ["word piece", "metaspace", "metaspace in a sequence", "none"])
@no_deadline
@given(ids=st.lists(st.integers(0, 7)), skip=st.booleans())
def test_other_decoders_join_to_the_decode(name, ids, skip):
    tokenizer = _other(OTHERS[name])
    assert scheme_of(tokenizer.backend) is None
    known = [i for i in ids if i < 6]
    expected = tokenizer.backend.decode(known, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=skip)) == expected


KNOWN = {
    "fuse": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
    "fuse and strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "byte fallback alone": decoders.ByteFallback(),
    "two replacements": decoders.Sequence([decoders.Replace("▁", " "), decoders.Replace(" c", "d")]),
}


@pytest.mark.parametrize("name", KNOWN)
@no_deadline
@given(ids=st.lists(st.integers(0, 7)), skip=st.booleans())
def test_shorter_chains_of_the_sentencepiece_kind_are_known_too(name, ids, skip):
    tokenizer = _other(KNOWN[name])
    assert scheme_of(tokenizer.backend) is not None
    expected = tokenizer.backend.decode([i for i in ids if i < 6], skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=skip)) == expected


def test_decoders_that_need_the_end_of_the_text_are_not_taken_for_a_known_kind():
    assert scheme_of(_other(OTHERS["strip at the end"]).backend) is None


def test_a_window_that_decode_stream_can_not_follow_is_decoded_again():
    tokenizer = _other(OTHERS["strip at the end"])
    ids = [3, 0, 3, 0, 3]  # the "a" at the end is dropped until something follows
    assert "".join(pieces(tokenizer, ids)) == tokenizer.backend.decode(ids)
