"""Clients that people use, unchanged."""

import asyncio
import warnings

import pytest

from corogen.params import GenerationConfig
from tests.server.helpers import answering, pipe_with_template, served

ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def url():
    with answering(PARIS, check=False) as pipe, served(pipe, api_keys=("secret",)) as url:
        yield url


class TestOpenAI:
    @pytest.fixture
    def openai(self):
        return pytest.importorskip("openai")

    @pytest.fixture
    def client(self, openai, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            yield client

    def test_chat(self, client):
        answer = client.chat.completions.create(model="tiny", messages=ASK)
        assert answer.choices[0].message.content == PARIS
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    def test_streamed_chat_with_usage(self, client):
        stream = client.chat.completions.create(
            model="tiny", messages=ASK, stream=True, n=2, stream_options={"include_usage": True}
        )
        *chunks, last = list(stream)
        for index in (0, 1):
            texts = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index]
            assert "".join(texts) == PARIS
        assert all(chunk.usage is None for chunk in chunks)
        assert (last.choices, last.usage.completion_tokens % 2) == ([], 0)

    def test_leaving_a_stream(self, client):
        with client.chat.completions.create(model="tiny", messages=ASK, stream=True) as stream:
            next(iter(stream))

    def test_completions(self, client):
        answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=50)
        assert [choice.text for choice in answer.choices] == [PARIS] * 4
        pieces = client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=50)
        assert "".join(piece.choices[0].text for piece in pieces) == PARIS

    def test_models(self, client):
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "corogen"

    def test_errors_are_its_own_exceptions(self, openai, client, url):
        with pytest.raises(openai.BadRequestError, match="temperature") as bad:
            client.chat.completions.create(model="tiny", messages=ASK, temperature=3.5)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError, match="other") as missing:
            client.chat.completions.create(model="other", messages=ASK)
        assert missing.value.code == "model_not_found"
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()

    async def test_async_streams_together(self, openai, url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as client:

            async def ask():
                stream = await client.chat.completions.create(model="tiny", messages=ASK, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            assert await asyncio.gather(*(ask() for _ in range(20))) == [PARIS] * 20


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_the_demo_model_answers_over_http_as_in_the_process():
    openai = pytest.importorskip("openai")
    from corogen import pipeline

    with pipeline("demo") as pipe, served(pipe) as url:
        expected = pipe.infer(ASK, GenerationConfig(max_new_tokens=12))
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = {"model": "tiny", "messages": ASK, "max_tokens": 12, "temperature": 0}
            whole = client.chat.completions.create(**asked).choices[0]
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "Paris" in expected.text
    assert whole.message.content == expected.text
    assert "".join(choice.delta.content or "" for choice in chunks) == expected.text
    assert whole.finish_reason == chunks[-1].finish_reason == expected.finish_reason


def test_langchain(url):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="secret", temperature=0)
    assert chat.invoke("What is the capital of France?").content == PARIS
    assert "".join(chunk.content for chunk in chat.stream("And again?")) == PARIS
    assert [answer.content for answer in chat.batch(["a", "b"])] == [PARIS] * 2


@pytest.mark.slow  # its import alone takes seconds
def test_litellm(url):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm = pytest.importorskip("litellm")
        asked = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "secret", "messages": ASK}
        assert litellm.completion(**asked).choices[0].message.content == PARIS
        chunks = litellm.completion(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schemathesis_finds_no_fault_of_the_server():
    schemathesis = pytest.importorskip("schemathesis")
    with pipe_with_template(check=False) as pipe, served(pipe) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for operation in schema.get_all_operations():
            case_strategy = operation.ok().as_strategy()
            _fuzz(case_strategy)


def _fuzz(strategy):
    import hypothesis

    @hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=strategy)
    def no_5xx(case):
        assert case.call().status_code < 500

    no_5xx()
