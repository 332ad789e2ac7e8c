"""`corogen chat`: turns, commands, stopped answers."""

import io

import pytest

from corogen.adapters.cli import chat as chat_module
from corogen.errors import PromptTooLong
from tests.adapters.cli_helpers import ScriptedPipeline, corogen, pieces, use


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def prompts(pipe):
    return [prompt for prompt, _, _ in pipe.asked]


def test_each_turn_carries_the_conversation(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline(pieces("Hel", "lo!"), pieces("Fine.")))
    done = corogen("chat", stdin="Hi\n\nHow are you?\n")
    assert (done.exit_code, done.stdout) == (0, "Hello!\nFine.\n")
    assert prompts(pipe) == [[user("Hi")], [user("Hi"), assistant("Hello!"), user("How are you?")]]
    assert pipe.closed == 1


def test_reset_forgets_and_keeps_the_system_message(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline(pieces("A")))
    corogen("chat", "--system", "Be brief.", stdin="one\n/reset\ntwo\n")
    assert prompts(pipe) == [[system("Be brief."), user("one")], [system("Be brief."), user("two")]]


def test_a_new_system_message_begins_anew_and_an_empty_one_removes_it(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline(pieces("A")))
    corogen("chat", stdin="one\n/system You are a pirate.\ntwo\n/system\nthree\n")
    assert prompts(pipe) == [[user("one")], [system("You are a pirate."), user("two")], [user("three")]]


def test_exit_leaves_and_nothing_after_it_is_asked(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline(pieces("A")))
    assert corogen("chat", stdin="/exit\nnever\n").exit_code == 0
    assert (pipe.asked, pipe.closed) == ([], 1)


def test_help_and_unknown_commands_answer_on_stderr(monkeypatch):
    use(monkeypatch, ScriptedPipeline())
    done = corogen("chat", stdin="/help\n/halp\n")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "/reset" in done.stderr
    assert "/halp" in done.stderr


def test_ctrl_c_stops_the_answer_alone_and_what_was_shown_is_remembered(monkeypatch):
    stopped = [*pieces("Once", " upon")[:1], KeyboardInterrupt()]
    pipe = use(monkeypatch, ScriptedPipeline(stopped, pieces("Yes.")))
    done = corogen("chat", stdin="Tell me\nGo on\n")
    assert (done.exit_code, done.stdout) == (0, "Once\nYes.\n")
    assert "(stopped)" in done.stderr
    assert prompts(pipe)[1] == [user("Tell me"), assistant("Once"), user("Go on")]
    assert pipe.streams[0].left


def test_an_answer_stopped_before_its_first_word_leaves_no_trace(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline([KeyboardInterrupt()], pieces("Yes.")))
    corogen("chat", stdin="Tell me\nGo on\n")
    assert prompts(pipe)[1] == [user("Go on")]


def test_ctrl_c_at_the_prompt_leaves(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline())

    class Interrupted(io.StringIO):
        def readline(self, *args):
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_module.sys, "stdin", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        from corogen.adapters.cli.options import EngineOptions, OutputOptions, SamplingOptions

        chat_module.talk(engine=EngineOptions(), sampling=SamplingOptions(), output=OutputOptions(), system=None)
    assert pipe.closed == 1


def test_a_refused_message_is_taken_back(monkeypatch):
    pipe = use(monkeypatch, ScriptedPipeline(PromptTooLong(9000, 8192), pieces("Yes.")))
    done = corogen("chat", stdin="long\nshort\n")
    assert (done.exit_code, done.stdout) == (0, "Yes.\n")
    assert "9000" in done.stderr
    assert prompts(pipe) == [[user("short")]]
