"""Token-level routes and EnergonAI's payload."""

import pytest

from tests.adapters.helpers import ENDLESS
from tests.server.helpers import client, encode, endless, error_of, events_of, pipe_with_template


@pytest.fixture
def pipe():
    with pipe_with_template() as pipe:
        yield pipe


class TestGenerate:
    async def test_text_and_token_ids_come_back(self, pipe):
        async with client(pipe) as http:
            reply = (await http.post("/generate", json={"prompt": "abcde", "max_tokens": 7})).json()
            same = (await http.post("/generate", json={"input_ids": encode("abcde"), "max_tokens": 7})).json()
        assert (reply["text"], reply["output_ids"]) == ("abcdeab", encode("abcdeab"))
        assert (same["text"], same["output_ids"]) == (reply["text"], reply["output_ids"])
        assert reply["meta_info"]["finish_reason"] == "length"
        assert (reply["meta_info"]["prompt_tokens"], reply["meta_info"]["completion_tokens"]) == (5, 7)

    async def test_streamed_pieces_hold_only_what_is_new(self, pipe):
        async with client(pipe) as http:
            reply = await http.post("/generate", json={"prompt": "abcde", "max_tokens": 7, "stream": True})
        pieces = events_of(reply.text)
        assert "".join(piece["text"] for piece in pieces) == "abcdeab"
        assert [i for piece in pieces for i in piece["output_ids"]] == encode("abcdeab")
        assert pieces[-1]["meta_info"]["finish_reason"] == "length"

    @pytest.mark.parametrize("body", [{}, {"prompt": "x", "input_ids": [1]}, {"prompt": "x", "n": 2}])
    async def test_what_makes_no_sense_is_refused(self, pipe, body):
        async with client(pipe) as http:
            assert (await http.post("/generate", json=body)).status_code == 400


class TestGeneration:
    @pytest.mark.parametrize("bound", [{"max_tokens": 5}, {"max_new_tokens": 5}])
    async def test_answers_with_the_text_alone(self, pipe, bound):
        body = {"prompt": "abcde", "top_k": 50, "top_p": 0.5, "temperature": 0.7, **bound}
        async with client(pipe) as http:
            reply = await http.post("/generation", json=body)
        assert reply.json() == {"text": "abcde"}

    async def test_a_full_queue_can_have_the_status_that_its_clients_know(self):
        with endless(queue_size=1) as pipe:
            held = pipe.stream_infer("x" * 50, ENDLESS)
            async with client(pipe, overload_status=406) as http:
                reply = await http.post("/generation", json={"prompt": "abcde"})
            held.close()
        assert (reply.status_code, error_of(reply)["code"]) == (406, "queue_full")


class TestTokens:
    async def test_there_and_back(self, pipe):
        async with client(pipe) as http:
            reply = (await http.post("/tokenize", json={"prompt": "Grüße"})).json()
            back = (await http.post("/detokenize", json={"tokens": reply["tokens"]})).json()
        assert (reply["tokens"], reply["count"]) == (encode("Grüße"), 7)
        assert back == {"prompt": "Grüße"}

    async def test_messages_go_through_the_template(self, pipe):
        async with client(pipe) as http:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            reply = (await http.post("/tokenize", json=body)).json()
        assert reply["tokens"] == encode("Hi")

    async def test_a_long_text_is_encoded_beside_the_loop(self, pipe):
        async with client(pipe) as http:
            reply = (await http.post("/tokenize", json={"prompt": "ab" * 20_000})).json()
            bad = {"messages": [{"role": "system", "content": "ab" * 20_000}]}
            refused = await http.post("/tokenize", json=bad)
        assert reply["count"] == 40_000
        assert error_of(refused)["code"] == "chat_template_error"

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/tokenize", {"messages": []}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": ["a"]}),
            ("/detokenize", {"tokens": [5, 10**6]}),
            ("/detokenize", {"tokens": [5, 2**70]}),
            ("/detokenize", {"tokens": [5] * 9000 + [10**6]}),
            ("/tokenize", {"prompt": "a", "model": "other"}),
        ],
    )
    async def test_nonsense_is_the_clients_fault(self, pipe, path, body):
        async with client(pipe) as http:
            assert (await http.post(path, json=body)).status_code in (400, 404)
