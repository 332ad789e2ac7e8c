"""What requests may hold. A field that this version can not honour is refused by its name, never ignored."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from corogen.adapters.server.errors import ApiError
from corogen.adapters.server.messages import Messages
from corogen.errors import UnsupportedFeature
from corogen.params import GenerationConfig

MAX_N = 128

# one bad item says enough: a list may hold millions
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]

#: known to OpenAI's, vLLM's or LMDeploy's users and not there yet -> values that ask for nothing
NOT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "frequency_penalty_range": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}

#: labels for the provider's own bookkeeping; they change no answer
BOOKKEEPING = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier", "user"}
)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    #: vLLM's: usage in every chunk
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(BaseModel):
    """Fields that all generating routes share. None means not given."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(None, description="A served name; when it is missing, the model that is served.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, description="When it is missing: as many as the context holds.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_token_ids: Ids | None = None
    priority: int | None = None
    timeout_s: float | None = Field(None, description="Seconds until the answer must be complete; else 504.")
    queue_timeout_s: float | None = Field(None, description="Seconds that it may wait for its turn; else 504.")

    #: fields that a route does not take although the others do
    refused: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Refuse what would have to be ignored.

        Raises:
            UnsupportedFeature: a known field that this version does not implement.
            ApiError: a field that there is not, or a combination without meaning.
        """
        for name, value in (self.model_extra or {}).items():
            if name in NOT_YET and not any(type(value) is type(none) and value == none for none in NOT_YET[name]):
                raise UnsupportedFeature(f"{name} is not supported by this version: leave it out", param=name)
            if name not in NOT_YET and name not in BOOKKEEPING:
                raise _unknown(name, type(self))
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for requests with stream: true", param="stream_options")

    @property
    def bound(self) -> int | None:
        """The bound on new tokens, whichever way it was given."""
        return self.max_tokens

    @property
    def choices(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    def gen_config(self, choice: int = 0, *, model_samples: bool = False) -> GenerationConfig:
        """Settings of one choice; with a seed, each choice has its own.

        It samples if the request sets something that only sampling knows, or asks for several choices; otherwise if
        the model's own generation_config.json says so.
        """
        given = {_PYTHON_NAMES.get(name, name): getattr(self, name) for name in _SETTINGS}
        given = {name: value for name, value in given.items() if value is not None}
        given["max_new_tokens"] = self.bound
        given["do_sample"] = model_samples or self.choices > 1 or any(given.get(name) is not None for name in _SAMPLING)
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if choice and "random_seed" in given:
            given["random_seed"] += choice
        return GenerationConfig(**given)


#: settings that go through, and their names in GenerationConfig where those differ
_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output", "bad_token_ids", "priority", "timeout_s",
    "queue_timeout_s",
)  # fmt: skip
_PYTHON_NAMES = {"seed": "random_seed", "stop": "stop_words", "min_tokens": "min_new_tokens"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "random_seed")


def _unknown(name: str, model: type[BaseModel]) -> ApiError:
    close = difflib.get_close_matches(name[:80], model.model_fields, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ApiError(400, f"there is no field {name[:80]!r} here{hint}", code="unknown_parameter", param=name[:80])


class ChatRequest(GenerationFields):
    """Body of /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_tokens": 32,
                "temperature": 0,
            }
        }
    )

    messages: Messages
    max_completion_tokens: int | None = Field(None, description="Wins over max_tokens.")

    @property
    def bound(self) -> int | None:
        """The bound on new tokens, whichever way it was given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationFields):
    """Body of /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}}
    )

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)] = Field(
        description="A text, token ids, or a list of either."
    )
    echo: bool | None = Field(None, description="Put the prompt before each answer.")


class GenerateRequest(GenerationFields):
    """Body of /generate."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}}
    )

    prompt: str | None = Field(None, description="Raw text; or give input_ids.")
    input_ids: Ids | None = None


class EnergonRequest(BaseModel):
    """Body of /generation: what EnergonAI's servers take."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        json_schema_extra={
            "example": {"prompt": "Question: Where were the 2004 Olympics held?\nAnswer:", "max_tokens": 64}
        },
    )

    prompt: str = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    temperature: float | None = Field(None, ge=0)
    greedy: bool | None = None

    def gen_config(self) -> GenerationConfig:
        """Settings of the answer: it samples if a sampling setting was given and `greedy` was not."""
        names = ("top_k", "top_p", "temperature")
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        bound = self.max_new_tokens if self.max_tokens is None else self.max_tokens
        if bound is not None:
            given["max_new_tokens"] = bound
        return GenerationConfig(do_sample=any(name in given for name in names) and not self.greedy, **given)


class TokenizeRequest(BaseModel):
    """Body of /tokenize: a raw text, or messages that go through the chat template."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"example": {"prompt": "Hello"}})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"example": {"tokens": [504, 3575]}})

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False
