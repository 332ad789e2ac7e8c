"""The merged slot of one request: each piece once, each end once, however often it is looked at."""

import pytest

from corogen.errors import StepFailed
from corogen.stream import Outgoing, Outlet


def make_outgoing():
    return Outgoing(Outlet(lambda outlet: None), pieces=True)


def test_an_error_is_raised_once_after_the_last_piece():
    """There may be more wake-ups than news: one for a piece, and one for the end that was taken with it."""
    out = make_outgoing()
    out.push("a", 1)
    out.fail(StepFailed("boom"))
    assert out.take().text == "a"
    with pytest.raises(StepFailed):
        out.take()
    assert out.take() is None
    assert out.finished


def test_an_end_is_taken_once():
    out = make_outgoing()
    out.push("a", 1)
    out.end("b", "stop", None, 0)
    assert out.take().text == "ab"
    assert out.take() is None
