"""What people read of the messages between engine and workers."""

import pytest

from corogen.wire.messages import PHASES, StartPhase


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (StartPhase("load"), "reading the weights"),
        (StartPhase("load", 30, 120), "reading the weights: 25 %"),
        (StartPhase("something new", 1, 2), "something new: 50 %"),
    ],
)
def test_a_phase_of_the_start_reads_as_words(phase, words):
    assert str(phase) == words


def test_no_phase_is_a_bare_word():
    assert all(" " in words for words in PHASES.values())
