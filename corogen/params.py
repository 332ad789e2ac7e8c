"""How one answer is generated: `GenerationConfig`, its check, and what it resolves to."""

from __future__ import annotations

import functools
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from corogen.config import refuse_unknown_fields
from corogen.errors import InvalidRequest, UnsupportedFeature
from corogen.wire.messages import Sampling

logger = logging.getLogger("corogen")

#: what a field means when neither the request nor the model's own defaults set it
ENGINE_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "max_new_tokens": 512,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "random_seed": None,
    "stop_words": None,
    "stop_token_ids": None,
    "bad_token_ids": None,
    "min_new_tokens": 0,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "priority": 0,
    "timeout_s": None,
    "queue_timeout_s": None,
}

#: fields that a model's generation_config.json may set for requests that sample
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

#: below this temperature the best token has all the weight that fp32 can express
GREEDY_BELOW = 1e-3

MAX_STOP_WORDS = 64

#: of top_p: what is smaller would be zero in fp32; it keeps the best token alone anyway
_LEAST_SHARE = 1e-30

#: a year: longer than any timer of an event loop should be
MAX_TIMEOUT_S = 365 * 86400.0


#: what becomes of a request for which there is no room: QueueFullError at once, or it waits for its turn
WhenFull = Literal["raise", "wait"]


def check_timeout(timeout_s: Any) -> None:
    """Raise InvalidRequest unless `timeout_s` is None or a number of seconds of at least 0."""
    if timeout_s is not None:
        _real("timeout_s", timeout_s, 0.0, MAX_TIMEOUT_S, False)


def may_wait(when_full: str) -> bool:
    """Whether `when_full` is "wait". Raises InvalidRequest if it is neither that nor "raise"."""
    if when_full not in ("raise", "wait"):
        raise InvalidRequest(f'when_full must be "raise" or "wait", not {when_full!r}', param="when_full")
    return when_full == "wait"


#: what other libraries call fields of GenerationConfig
_OTHER_NAMES = {"max_tokens": "max_new_tokens", "seed": "random_seed", "stop": "stop_words"}


def _unknown_fields(problems: dict[str, str]) -> InvalidRequest:
    return InvalidRequest(f"GenerationConfig: {'; '.join(problems.values())}", param=next(iter(problems)))


@refuse_unknown_fields(_unknown_fields, other_names=_OTHER_NAMES)
@dataclass(kw_only=True)
class GenerationConfig:
    """Settings of one answer. A field that is not given is *unset*: the model's own default, then the engine's, holds.

    Names and meanings follow LMDeploy. Without `do_sample=True` decoding is greedy, whatever the other settings say.

    Raises:
        InvalidRequest: at once for a name that does not exist, and with the request for everything else.
    """

    n: int | UnsetType = UNSET
    #: bound on new tokens (512 when unset); None: as many as the context holds. Capped by what is left of the context
    max_new_tokens: int | UnsetType | None = UNSET
    do_sample: bool | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    #: 0: off
    top_k: int | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    #: do not stop at the model's end tokens
    ignore_eos: bool | UnsetType = UNSET
    #: the same seed gives the same answer, whatever else runs; None: a new one each time
    random_seed: int | UnsetType | None = UNSET
    #: strings that end the answer, also across tokens
    stop_words: list[str] | str | UnsetType | None = UNSET
    stop_token_ids: list[int] | UnsetType | None = UNSET
    #: ids that are never chosen
    bad_token_ids: list[int] | UnsetType | None = UNSET
    #: end tokens and stop token ids can not be chosen before this many new tokens
    min_new_tokens: int | UnsetType | None = UNSET
    skip_special_tokens: bool | UnsetType = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET
    #: lower runs first; each step of it is worth ten seconds of waiting, so that nobody waits for ever
    priority: int | UnsetType = UNSET
    #: seconds from submission until the answer must be complete, else RequestTimeout; None: no bound
    timeout_s: float | UnsetType | None = UNSET
    #: seconds from submission until the request must first run, else RequestTimeout; None: no bound
    queue_timeout_s: float | UnsetType | None = UNSET
    # known to LMDeploy's users and not there yet: refused by name when set
    logprobs: int | UnsetType | None = UNSET
    response_format: dict[str, Any] | UnsetType | None = UNSET
    logits_processors: list[Any] | UnsetType | None = UNSET
    bad_words: list[str] | UnsetType | None = UNSET
    output_logits: str | UnsetType | None = UNSET
    output_last_hidden_state: str | UnsetType | None = UNSET
    return_ppl: bool | UnsetType = UNSET
    repetition_ngram_size: int | UnsetType = UNSET
    repetition_ngram_threshold: int | UnsetType = UNSET
    spaces_between_special_tokens: bool | UnsetType = UNSET

    def explicit(self) -> dict[str, Any]:
        """The fields that were given."""
        return {f.name: _builtin(v) for f in fields(self) if (v := getattr(self, f.name)) is not UNSET}


def _builtin(value: Any) -> Any:
    """A number of numpy as Python's own, also inside a list; anything else as it is."""
    if isinstance(value, list | tuple):
        return [_builtin(item) for item in value]
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return value.item() if is_scalar else value


_NOT_YET = {
    "logprobs": None,
    "response_format": None,
    "logits_processors": None,
    "bad_words": None,
    "output_logits": None,
    "output_last_hidden_state": None,
    "return_ppl": False,
    "repetition_ngram_size": 0,
    "repetition_ngram_threshold": 0,
    "spaces_between_special_tokens": True,
}


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends an answer, apart from its length."""

    token_ids: frozenset[int] = frozenset()
    #: what to report for those of them that the caller named; the model's own end tokens are no news
    reasons: Mapping[int, str | int] = field(default_factory=dict)
    strings: tuple[str, ...] = ()
    include: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is checked against, known once the model is loaded."""

    #: prompt and answer together
    max_len: int
    #: ids that the model has an embedding for
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    #: from generation_config.json, for requests that sample
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: whether that file says that requests sample by default, which counts over HTTP only
    samples: bool = False
    #: stop strings that are one added token each, by text
    added_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked config with every default filled in."""

    sampling: Sampling
    stop: StopRule
    max_new_tokens: int
    skip_special_tokens: bool
    priority: int
    timeout_s: float | None
    queue_timeout_s: float | None


def check_fields(given: Mapping[str, Any], vocab_size: int) -> None:
    """Raise InvalidRequest for the first field of `given` that has a wrong type or value, naming both."""
    for name, neutral in _NOT_YET.items():
        if name in given and not _is(given[name], neutral):
            raise UnsupportedFeature(f"{name}={given[name]!r} is not supported by this version", param=name)
    if given.get("n", 1) != 1:
        _whole("n", given["n"], 1, 128)
        raise UnsupportedFeature(f"n={given['n']}: submit the prompt {given['n']} times instead", param="n")
    for name, (low, high) in _WHOLE.items():
        if name in given and not (name in _OPTIONAL and given[name] is None):
            _whole(name, given[name], low, high)
    for name, (low_f, high_f, open_low) in _REAL.items():
        if name in given and not (name in _OPTIONAL and given[name] is None):
            _real(name, given[name], low_f, high_f, open_low)
    for name in _FLAGS:
        if name in given and not isinstance(given[name], bool):
            raise InvalidRequest(f"{name} must be True or False, not {given[name]!r}", param=name)
    for name in ("stop_token_ids", "bad_token_ids"):
        _check_ids(name, given.get(name), vocab_size)
    stop_strings(given.get("stop_words"))


def _is(value: Any, neutral: Any) -> bool:
    """Whether `value` means nothing; of any type, also of one whose comparison gives no single answer."""
    return value is neutral or (type(value) is type(neutral) and value == neutral)


_OPTIONAL = ("max_new_tokens", "min_new_tokens", "random_seed", "timeout_s", "queue_timeout_s")
_WHOLE = {
    "max_new_tokens": (1, None),
    "min_new_tokens": (0, 2**31),
    "top_k": (0, 2**31),
    "random_seed": (-(2**63), 2**64 - 1),
    "priority": (-(2**31), 2**31),
}
_REAL = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.01, 100.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "timeout_s": (0.0, MAX_TIMEOUT_S, True),
    "queue_timeout_s": (0.0, MAX_TIMEOUT_S, True),
}
_FLAGS = ("do_sample", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


def _whole(name: str, value: Any, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        upto = "" if high is None else f" and at most {high}"
        raise InvalidRequest(f"{name} must be a whole number of at least {low}{upto}, not {value!r}", param=name)


def _real(name: str, value: Any, low: float, high: float, open_low: bool) -> None:
    good = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
    if not good or (open_low and value == low):
        above = "above" if open_low else "of at least"
        raise InvalidRequest(f"{name} must be a number {above} {low:g} and at most {high:g}, not {value!r}", param=name)


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    if ids is None:
        return
    if not isinstance(ids, list | tuple):
        raise InvalidRequest(f"{name} must be a list of token ids, not {ids!r}", param=name)
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab_size:
            raise InvalidRequest(
                f"{name} holds {i!r}; token ids of this model run from 0 to {vocab_size - 1}", param=name
            )


def stop_strings(value: Any) -> tuple[str, ...]:
    """`stop_words` as a tuple. None and an empty list mean no stop; an empty string would stop everything."""
    words = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(w, str) for w in words):
        raise InvalidRequest(f"stop_words must be a string or a list of strings, not {value!r}", param="stop_words")
    if not all(words):
        raise InvalidRequest(
            "stop_words holds an empty string, which every answer contains: drop it", param="stop_words"
        )
    if len(words) > MAX_STOP_WORDS:
        raise InvalidRequest(f"stop_words holds {len(words)} strings; at most {MAX_STOP_WORDS}", param="stop_words")
    return tuple(words)


def resolve(config: GenerationConfig | None, prompt_len: int, model: ModelFacts) -> Resolved:
    """Check `config` and fill in every default: request, then the model's file, then the engine's.

    Raises:
        InvalidRequest: naming the field, its value and what is allowed.
    """
    given = _given(config)
    check_fields(given, model.vocab_size)
    if "do_sample" not in given and any(given.get(name) is not None for name in _SAMPLING_ONLY) and not _greedy(given):
        _warn_of_unused_sampling()
    value = {**ENGINE_DEFAULTS, **(model.defaults if given.get("do_sample") else {}), **given}
    named = _named_stops(value, model)
    stop = frozenset(named) if value["ignore_eos"] else frozenset(named) | model.eos_ids
    _check_choice(value, stop, model)
    words = stop_strings(value["stop_words"])
    room = model.max_len - prompt_len
    return Resolved(
        sampling=_sampling(value, stop, prompt_len),
        stop=StopRule(stop, named, words, value["include_stop_str_in_output"]),
        max_new_tokens=min(room, value["max_new_tokens"] or room),
        skip_special_tokens=value["skip_special_tokens"],
        priority=value["priority"],
        timeout_s=value["timeout_s"],
        queue_timeout_s=value["queue_timeout_s"],
    )


def _check_choice(value: Mapping[str, Any], stop: frozenset[int], model: ModelFacts) -> None:
    """Raise InvalidRequest if no id is left to choose from."""
    banned = set(value["bad_token_ids"] or ())
    if value["min_new_tokens"]:
        banned |= stop
    if len(banned) >= model.vocab_size:
        raise InvalidRequest("bad_token_ids leaves no token to choose from", param="bad_token_ids")


#: what has no effect on a greedy answer
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "random_seed")


def _greedy(value: Mapping[str, Any]) -> bool:
    """Whether these settings leave one token to choose, even if they sample."""
    return bool(value.get("temperature", 1.0) < GREEDY_BELOW or value.get("top_k") == 1)


@functools.cache
def _warn_of_unused_sampling() -> None:
    """Once in a process."""
    logger.warning("%s have no effect without do_sample=True: the answer is greedy", ", ".join(_SAMPLING_ONLY))


def _given(config: GenerationConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, GenerationConfig):
        raise InvalidRequest(
            f"gen_config must be a GenerationConfig or None, not {type(config).__name__}", param="gen_config"
        )
    return config.explicit()


def _named_stops(value: Mapping[str, Any], model: ModelFacts) -> dict[int, str | int]:
    """Stop token ids, and stop strings that are one added token (which decoding may not show), by id."""
    words = stop_strings(value["stop_words"])
    named: dict[int, str | int] = {model.added_tokens[w]: w for w in words if w in model.added_tokens}
    return named | {i: i for i in value["stop_token_ids"] or ()}


def _sampling(value: Mapping[str, Any], stop: frozenset[int], prompt_len: int) -> Sampling:
    minimum = value["min_new_tokens"] or 0
    greedy = not value["do_sample"] or _greedy(value)
    seed = value["random_seed"]
    return Sampling(
        temperature=0.0 if greedy else float(value["temperature"]),
        top_k=value["top_k"],
        top_p=max(float(value["top_p"]), _LEAST_SHARE),
        min_p=float(value["min_p"]),
        seed=seed % 2**63 if seed is not None else 0 if greedy else secrets.randbits(63),
        suppress_ids=tuple(sorted(stop)) if minimum else (),
        suppress_until=prompt_len + minimum,
        banned_ids=tuple(value["bad_token_ids"] or ()),
        repetition_penalty=float(value["repetition_penalty"]),
        presence_penalty=float(value["presence_penalty"]),
        frequency_penalty=float(value["frequency_penalty"]),
    )
