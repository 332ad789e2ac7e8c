"""Chat and completions: the answers of the pipeline in OpenAI's shapes."""

import pytest

from corogen.adapters.server.messages import template_form
from corogen.params import GenerationConfig
from tests.server.helpers import (
    CHAT,
    TEXT,
    answering,
    client,
    encode,
    error_of,
    events_of,
    finishes,
    joined,
    pipe_with_template,
    user,
)


@pytest.fixture
def pipe():
    with pipe_with_template() as pipe:
        yield pipe


class TestChat:
    async def test_answers_as_the_pipeline_does(self, pipe):
        expected = pipe.infer([{"role": "user", "content": "abcde"}], GenerationConfig(max_new_tokens=12))
        async with client(pipe) as http:
            reply = (await http.post(CHAT, json=user())).json()
        [choice] = reply["choices"]
        assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
        assert choice["finish_reason"] == expected.finish_reason == "length"
        assert reply["usage"]["prompt_tokens"] == expected.input_token_len
        assert reply["usage"]["completion_tokens"] == 12
        assert (reply["object"], reply["model"]) == ("chat.completion", "tiny")

    async def test_streams_the_same_answer(self, pipe):
        async with client(pipe) as http:
            whole = (await http.post(CHAT, json=user())).json()
            reply = await http.post(CHAT, json=user(stream=True))
        events = events_of(reply.text)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert joined(events) == whole["choices"][0]["message"]["content"]
        assert finishes(events) == ["length"]
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in events}) == 1
        assert not any("usage" in event for event in events)

    async def test_several_choices_have_their_own_seeds(self, pipe, monkeypatch):
        seen = []
        prepare = pipe.engine.prepare

        def note(prompt, config, **options):
            seen.append(config)
            return prepare(prompt, config, **options)

        monkeypatch.setattr(pipe.engine, "prepare", note)
        async with client(pipe) as http:
            reply = (await http.post(CHAT, json=user(n=3, seed=7))).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert [config.random_seed for config in seen] == [7, 8, 9]
        assert all(config.do_sample for config in seen)
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (5, 36)

    async def test_stop_strings_end_the_answer(self):
        with answering("one two three") as pipe:
            async with client(pipe) as http:
                reply = (await http.post(CHAT, json=user(stop=" three"))).json()
                streamed = events_of((await http.post(CHAT, json=user(stop=[" three"], stream=True))).text)
        assert reply["choices"][0]["message"]["content"] == joined(streamed) == "one two"
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["choices"][0]["stop_reason"] == " three"

    async def test_without_a_bound_the_context_is_the_bound(self):
        with pipe_with_template(fake={"max_positions": 64}) as pipe:
            async with client(pipe) as http:
                reply = (await http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 40}]})).json()
        assert reply["usage"]["completion_tokens"] == 24
        assert reply["choices"][0]["finish_reason"] == "length"

    async def test_usage_in_every_chunk_when_asked_for(self, pipe):
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with client(pipe) as http:
            events = events_of((await http.post(CHAT, json=user(stream=True, stream_options=options))).text)
        assert all(event["usage"]["prompt_tokens"] == 5 for event in events)
        assert events[-1]["usage"]["completion_tokens"] == 12
        assert events[-1]["choices"] == []

    async def test_a_missing_model_is_the_served_one_and_aliases_are_known(self, pipe):
        async with client(pipe, served_model_names=("tiny", "gpt-4o")) as http:
            for body in (user(), user(model=None), user(model="tiny"), user(model="gpt-4o")):
                reply = await http.post(CHAT, json=body)
                assert (reply.status_code, reply.json()["model"]) == (200, "tiny")


class TestSampling:
    @pytest.mark.parametrize(
        ("given", "samples"),
        [({}, False), ({"temperature": 0.7}, True), ({"top_p": 0.9}, True), ({"seed": 1}, True), ({"n": 2}, True)],
    )
    def test_what_only_sampling_knows_makes_a_request_sample(self, given, samples):
        from corogen.adapters.server.schema import ChatRequest

        body = ChatRequest(messages=[], **given)
        assert body.gen_config().do_sample is samples
        assert body.gen_config(model_samples=True).do_sample is True

    def test_nothing_that_was_not_given_is_set(self):
        from corogen.adapters.server.schema import ChatRequest

        assert ChatRequest(messages=[]).gen_config().explicit() == {"do_sample": False, "max_new_tokens": None}

    def test_the_newer_name_of_the_bound_wins(self):
        from corogen.adapters.server.schema import ChatRequest

        body = ChatRequest(messages=[], max_tokens=5, max_completion_tokens=7, top_k=-1)
        assert (body.gen_config().max_new_tokens, body.gen_config().top_k) == (7, 0)


class TestToolCalls:
    def test_arguments_reach_the_template_as_an_object(self):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        [message] = template_form([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        assert call["function"]["arguments"] == '{"a": 1}'

    @pytest.mark.parametrize("arguments", ["no json", "[1]", None, 5])
    def test_what_is_no_object_stays_as_it_is(self, arguments):
        call = {"function": {"name": "f", "arguments": arguments}}
        [message] = template_form([{"role": "assistant", "tool_calls": [call]}])
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


class TestCompletions:
    async def test_continues_raw_text_as_the_pipeline_does(self, pipe):
        config = GenerationConfig(max_new_tokens=12)
        expected = pipe.infer("abcde", config, do_preprocess=False)
        async with client(pipe) as http:
            reply = (await http.post(TEXT, json={"prompt": "abcde", "max_tokens": 12})).json()
            by_ids = (await http.post(TEXT, json={"prompt": encode("abcde"), "max_tokens": 12})).json()
        assert reply["choices"][0]["text"] == by_ids["choices"][0]["text"] == expected.text
        assert reply["object"] == "text_completion"

    @pytest.mark.parametrize("prompt", [["example 1", "ex 2"], [[65, 66], [67]]])
    async def test_lists_choices_and_echo(self, pipe, prompt):
        body = {"prompt": prompt, "n": 2, "echo": True, "max_tokens": 4}
        async with client(pipe) as http:
            reply = (await http.post(TEXT, json=body)).json()
            events = events_of((await http.post(TEXT, json={**body, "stream": True})).text)
        texts = [p if isinstance(p, str) else bytes(p).decode() for p in prompt for _ in range(2)]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        for choice, text in zip(reply["choices"], texts, strict=True):
            assert choice["text"].startswith(text)
            assert len(choice["text"]) == len(text) + 4
            assert joined(events, choice["index"]) == choice["text"]
            assert finishes(events, choice["index"]) == ["length"]

    async def test_one_bad_prompt_of_a_list_fails_the_call_and_leaves_nothing_behind(self, pipe):
        async with client(pipe) as http:
            for prompt in (["a", ""], [[1, 2], [99999]]):
                for stream in (False, True):
                    reply = await http.post(TEXT, json={"prompt": prompt, "stream": stream, "max_tokens": 4})
                    assert reply.status_code == 400
                    assert error_of(reply)["param"] == "prompt"

    async def test_a_bad_prompt_at_the_end_of_a_long_list_fails_the_call_too(self, pipe):
        body = {"prompt": ["a"] * 100 + [""], "max_tokens": 4}
        async with client(pipe) as http:
            whole = await http.post(TEXT, json=body)
            streamed = await http.post(TEXT, json={**body, "stream": True})
        assert error_of(whole)["param"] == "prompt"
        assert streamed.status_code == 400 or events_of(streamed.text)[-1]["error"]["param"] == "prompt"

    async def test_too_many_choices_are_refused(self, pipe):
        async with client(pipe, max_choices=8) as http:
            reply = await http.post(TEXT, json={"prompt": ["x"] * 3, "n": 3})
        assert "8 choices" in error_of(reply)["message"]
