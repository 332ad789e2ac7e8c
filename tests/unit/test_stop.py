"""The stop matcher equals a search of the whole text, however the text is cut, and keeps back no more than it must."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corogen.text.stop import StopMatcher

#: a busy machine is no fault
no_deadline = settings(deadline=None)


def reference(text, stops, include):
    """(sent, match) by trying every end of the text in turn."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def held_back(text, stops):
    """The longest end of `text` that is a proper beginning of a stop string."""
    ends = (text[i:] for i in range(len(text) + 1))
    return next(end for end in ends if any(len(end) < len(stop) and stop.startswith(end) for stop in stops))


def feed(matcher, chunks):
    sent, match = "", None
    for chunk in chunks:
        more, found = matcher.push(chunk)
        sent += more
        match = match or found
    return sent + matcher.flush(), match


words = st.text(alphabet="ab", min_size=1, max_size=5)
stop_sets = st.lists(words, min_size=1, max_size=4).map(tuple)


@no_deadline
@given(chunks=st.lists(st.text(alphabet="abc", max_size=5), max_size=12), stops=stop_sets, include=st.booleans())
def test_equals_a_search_of_the_whole_text_for_any_chunking(chunks, stops, include):
    assert feed(StopMatcher(stops, include), chunks) == reference("".join(chunks), stops, include)


@no_deadline
@given(chunks=st.lists(st.text(alphabet="abc", max_size=4), max_size=8), stops=stop_sets)
def test_keeps_back_exactly_what_may_still_become_a_stop(chunks, stops):
    matcher, text, sent = StopMatcher(stops, False), "", ""
    for chunk in chunks:
        text += chunk
        more, found = matcher.push(chunk)
        sent += more
        if found:
            return
        assert sent + held_back(text, stops) == text


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(("END",), True)
    assert matcher.push("x END y") == ("x END", "END")
    assert matcher.push("more END") == ("", None)
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes():
    assert StopMatcher((), False).push("text") == ("text", None)


def test_of_two_that_complete_together_the_longer_wins():
    assert StopMatcher(("bc", "abc"), False).push("xabc") == ("x", "abc")


def test_a_long_periodic_stop_string_costs_no_more_than_its_length():
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher((stop,), False)
    for _ in range(100):
        matcher.push("a" * 300)
    assert matcher.push("b") == ("", stop)


@pytest.mark.parametrize("include", [False, True])
def test_text_that_can_not_begin_a_stop_is_sent_at_once(include):
    matcher = StopMatcher(("Z" * 20,), include)
    assert [matcher.push(word)[0] for word in ("a ", "b ", "c")] == ["a ", "b ", "c"]
