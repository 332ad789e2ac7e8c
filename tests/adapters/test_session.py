"""Conversations: the history grows by complete answers and by nothing else."""

import threading

import pytest

from corogen.adapters import Session
from corogen.admission import Admission
from corogen.errors import EngineClosed, InvalidRequest, PromptTooLong, StepFailed
from corogen.params import GenerationConfig
from corogen.text.chat import ChatTemplate
from tests.adapters.helpers import ENDLESS, assert_nothing_runs, scripted, slowly
from tests.conftest import eventually
from tests.engine.helpers import says

pytestmark = pytest.mark.usefixtures("no_threads_left")

HI = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello there"}


@pytest.fixture(autouse=True)
def chat_model(monkeypatch):
    """A model with a chat template, which remembers what it was asked."""
    asked = []
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    render = template.render
    monkeypatch.setattr(template, "render", lambda messages: asked.append(list(messages)) or render(messages))
    original = Admission.__init__
    monkeypatch.setattr(Admission, "__init__", lambda self, tok, _, facts: original(self, tok, template, facts))
    return asked


def talking(**options):
    return scripted(says("Hello there", then_eos=True), **options)


def test_the_history_is_sent_again_each_time(chat_model):
    with talking() as pipe:
        chat = pipe.session([{"role": "system", "content": "Be kind."}])
        assert pipe.chat("Hi", session=chat).text == "Hello there"
        assert pipe.chat("And?", session=chat).text == "Hello there"
        assert chat_model[1] == [
            {"role": "system", "content": "Be kind."},
            HI,
            ANSWER,
            {"role": "user", "content": "And?"},
        ]
        assert chat.history[-1] == ANSWER
        assert chat.response.finish_reason == "stop"
        chat.reset()
        assert chat.history == []


@pytest.mark.parametrize("wrong", ["be brief", [1], ["be brief"], HI, None, 5])
def test_a_session_begins_with_a_list_of_messages_or_not_at_all(wrong):
    with pytest.raises(InvalidRequest, match="list of messages") as caught:
        Session(wrong)
    assert caught.value.param == "messages"
    assert Session((HI,)).history == [HI]


def test_a_message_a_list_of_messages_and_no_session(chat_model):
    with talking() as pipe:
        pipe.chat(HI)
        pipe.chat([HI, ANSWER, HI], pipe.session())
        assert chat_model == [[HI], [HI, ANSWER, HI]]
        for wrong in ([1, 2], 42, [], ["text"]):
            with pytest.raises(InvalidRequest, match="in a chat"):
                pipe.chat(wrong, pipe.session())
        with pytest.raises(InvalidRequest, match="session must come from"):
            pipe.chat("Hi", session="mine")


def test_a_stream_enters_the_history_at_its_end():
    with talking() as pipe:
        chat = pipe.session()
        pieces = pipe.chat("Hi", session=chat, stream_response=True)
        assert chat.history == []
        assert "".join(piece.text for piece in pieces) == "Hello there"
        assert chat.history == [HI, ANSWER]


def test_a_stream_that_is_left_does_not():
    with slowly() as pipe:
        chat = pipe.session()
        with pipe.chat("Hi", chat, ENDLESS, stream_response=True) as pieces:
            next(pieces)
        assert_nothing_runs(pipe)
        pieces = pipe.chat("Hi", chat, ENDLESS, stream_response=True)
        next(pieces)
        del pieces
        assert_nothing_runs(pipe)
        assert chat.history == []
        assert pipe.chat("Hi", chat, GenerationConfig(max_new_tokens=2)).generate_token_len == 2


def test_an_abort_leaves_the_history_as_it_was():
    with slowly() as pipe:
        chat, answers = pipe.session(), []
        thread = threading.Thread(target=lambda: answers.append(pipe.chat("Hi", chat, ENDLESS)))
        thread.start()
        assert eventually(lambda: pipe.stats().running)
        pipe.abort(chat)
        thread.join(5)
        assert answers[0].finish_reason == "abort"
        assert chat.history == []
        pipe.abort(chat)


def test_an_error_leaves_the_history_as_it_was_and_the_session_usable():
    with talking(fake={"fail_at": {2: RuntimeError("boom")}}, on_worker_failure="fail") as pipe:
        chat = pipe.session()
        with pytest.raises(StepFailed):
            pipe.chat("Hi", chat)
        with pytest.raises(PromptTooLong):
            pipe.chat("x" * 5000, chat)
        assert chat.history == []
        assert pipe.chat("Hi", chat).text == "Hello there"
        assert chat.history == [HI, ANSWER]


def test_one_question_at_a_time():
    with slowly() as pipe:
        chat = pipe.session()
        with pipe.chat("first", chat, ENDLESS, stream_response=True):
            with pytest.raises(InvalidRequest, match="another question") as caught:
                pipe.chat("second", chat)
            assert caught.value.param == "session"
        assert pipe.chat("third", chat, GenerationConfig(max_new_tokens=1)).generate_token_len == 1


def test_a_session_has_settings_of_its_own():
    with slowly() as pipe:
        chat = pipe.session(gen_config=GenerationConfig(max_new_tokens=3))
        assert pipe.chat("Hi", chat).generate_token_len == 3
        assert pipe.chat("Hi", chat, GenerationConfig(max_new_tokens=5)).generate_token_len == 5


def test_a_session_outlives_its_pipeline():
    chat = Session()
    with talking() as pipe:
        pipe.chat("Hi", chat)
    with pytest.raises(EngineClosed):
        pipe.chat("And?", chat)
    with talking() as pipe:
        pipe.chat("And?", chat)
    assert len(chat.history) == 4
