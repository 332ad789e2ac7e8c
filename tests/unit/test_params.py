"""Every bad setting of an answer is refused by name and value; unset, file and engine defaults come in that order."""

import math

import pytest

from corogen.errors import InvalidRequest, UnsupportedFeature
from corogen.params import (
    MAX_STOP_WORDS,
    GenerationConfig,
    ModelFacts,
    _warn_of_unused_sampling,
    resolve,
    stop_strings,
)

FACTS = ModelFacts(
    max_len=100,
    vocab_size=50,
    eos_ids=frozenset([1, 2]),
    defaults={"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.05},
    added_tokens={"<stop>": 40},
)


def settle(prompt_len=10, model=FACTS, **fields):
    return resolve(GenerationConfig(**fields), prompt_len, model)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, NAN, INF, -INF, 101, "hot", None, True, 1 + 2j)],
        *[("top_p", v) for v in (0.0, -1, 1.1, NAN, "x", None)],
        *[("min_p", v) for v in (-0.1, 1.1, NAN)],
        *[("top_k", v) for v in (-1, 1.5, "3", None, True)],
        *[("repetition_penalty", v) for v in (0, -1, NAN, 101)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, NAN)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, "x")],
        *[("max_new_tokens", v) for v in (0, -1, 1.0, "9", NAN, True)],
        *[("min_new_tokens", v) for v in (-1, 0.5)],
        *[("random_seed", v) for v in (2**64, -(2**63) - 1, 1.0, "x")],
        *[("priority", v) for v in (2**31 + 1, 0.5, None)],
        *[("do_sample", v) for v in (1, "yes", None)],
        *[("ignore_eos", v) for v in (0, None)],
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", "no"),
        *[("stop_token_ids", v) for v in ([50], [-1], [True], ["a"], 3, [1.0])],
        *[("bad_token_ids", v) for v in ([50], [-1], "a")],
        *[("stop_words", v) for v in ("", [""], ["a", ""], 3, ["a", 3], {"a": 1}, ["x"] * (MAX_STOP_WORDS + 1))],
        *[("n", v) for v in (0, -1, 10**7, 1.5, "2")],
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_field(field, value):
    with pytest.raises(InvalidRequest, match=field) as caught:
        settle(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"), [("n", 10**7), ("max_new_tokens", -1), ("temperature", 3000.0), ("top_k", "many")]
)
def test_the_message_holds_the_value(field, value):
    with pytest.raises(InvalidRequest) as caught:
        settle(**{field: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("logits_processors", [print]),
        ("bad_words", ["x"]),
        ("return_ppl", True),
        ("repetition_ngram_size", 3),
        ("n", 2),
    ],
)
def test_what_is_not_there_yet_is_refused_and_never_ignored(field, value):
    with pytest.raises(UnsupportedFeature, match=field) as caught:
        settle(**{field: value})
    assert caught.value.param == field


def test_what_is_not_there_yet_may_be_given_as_off():
    assert settle(logprobs=None, return_ppl=False, bad_words=None, repetition_ngram_size=0, n=1)


@pytest.mark.parametrize("config", [{"temperature": 1}, "greedy", 3])
def test_a_config_of_another_type_is_named(config):
    with pytest.raises(InvalidRequest, match=type(config).__name__) as caught:
        resolve(config, 1, FACTS)
    assert caught.value.param == "gen_config"


def test_without_a_config_decoding_is_greedy():
    for resolved in (resolve(None, 10, FACTS), settle(), settle(temperature=0.7)):
        assert resolved.sampling.temperature == 0
        assert resolved.sampling.repetition_penalty == 1
        assert resolved.max_new_tokens == 90
    assert resolve(None, 10, ModelFacts(10**6, 50)).max_new_tokens == 512


@pytest.mark.parametrize("field", [{"temperature": 0.0}, {"temperature": 1e-4}, {"temperature": 1e-10}, {"top_k": 1}])
def test_what_leaves_one_choice_is_greedy(field):
    plain = ModelFacts(max_len=100, vocab_size=50)
    assert settle(model=plain, do_sample=True, **field).sampling.temperature == 0


class TestPrecedence:
    def test_the_file_counts_for_requests_that_sample(self):
        file = ModelFacts(max_len=100, vocab_size=50, defaults={"temperature": 0.6, "top_k": 7})
        sampling = settle(model=file, do_sample=True).sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 7, 1.0)

    def test_what_the_request_sets_wins(self):
        sampling = settle(do_sample=True, temperature=10, top_k=5).sampling
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (10, 5, 1.05)

    def test_greedy_requests_ignore_the_file(self):
        assert settle().sampling.repetition_penalty == 1


class TestSeed:
    def test_a_seed_is_kept(self):
        assert settle(do_sample=True, random_seed=7).sampling.seed == 7
        assert 0 <= settle(random_seed=-1).sampling.seed < 2**63
        assert 0 <= settle(random_seed=2**64 - 1).sampling.seed < 2**63

    def test_without_one_each_request_has_its_own(self):
        asked = {"do_sample": True, "top_k": 5}
        assert settle(**asked).sampling.seed != settle(**asked).sampling.seed
        asked["random_seed"] = None
        assert settle(**asked).sampling.seed != settle(**asked).sampling.seed

    def test_a_greedy_request_needs_none(self):
        assert settle().sampling.seed == settle().sampling.seed


class TestEnds:
    def test_new_tokens_are_bounded_by_the_context(self):
        for wanted in (10**12, None, 100, 91):
            assert settle(max_new_tokens=wanted).max_new_tokens == 90
        assert settle(max_new_tokens=5).max_new_tokens == 5

    def test_end_tokens_of_the_model_and_the_request_add_up(self):
        assert settle().stop.token_ids == {1, 2}
        assert settle(stop_token_ids=[3]).stop.token_ids == {1, 2, 3}
        assert settle(stop_token_ids=[3], ignore_eos=True).stop.token_ids == {3}
        assert settle(ignore_eos=True).stop.token_ids == set()

    def test_a_stop_string_that_is_an_added_token_stops_by_its_id_too(self):
        rule = settle(stop_words=["<stop>", "END"]).stop
        assert (rule.token_ids, rule.strings) == ({1, 2, 40}, ("<stop>", "END"))

    @pytest.mark.parametrize("nothing", [None, [], ()])
    def test_no_stop_words(self, nothing):
        assert stop_strings(nothing) == ()
        assert settle(stop_words=nothing).stop.strings == ()

    def test_one_stop_word_may_stand_alone(self):
        assert settle(stop_words="END", include_stop_str_in_output=True).stop.strings == ("END",)
        assert settle(stop_words="END", include_stop_str_in_output=True).stop.include

    def test_end_tokens_are_held_off_until_the_minimum(self):
        sampling = settle(min_new_tokens=4, stop_token_ids=[9]).sampling
        assert (sampling.suppress_ids, sampling.suppress_until) == ((1, 2, 9), 14)
        assert settle().sampling.suppress_ids == ()
        assert settle(min_new_tokens=None).sampling.suppress_ids == ()

    def test_banned_ids_travel(self):
        assert settle(bad_token_ids=[4, 3]).sampling.banned_ids == (4, 3)


def test_all_numbers_that_resolve_are_finite():
    sampling = settle(do_sample=True, temperature=100, top_p=1e-9, min_p=1, presence_penalty=2).sampling
    values = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence_penalty)
    assert all(math.isfinite(value) for value in values)


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("max_tokens", "max_new_tokens"),
            ("seed", "random_seed"),
            ("stop", "stop_words"),
            ("temprature", "temperature"),
        ],
    )
    def test_a_name_from_elsewhere_is_refused_with_the_one_that_is_meant(self, name, field):
        with pytest.raises(InvalidRequest, match=f"no setting '{name}'; did you mean '{field}'") as caught:
            GenerationConfig(**{name: 3})
        assert caught.value.param == name

    def test_all_of_them_are_named(self):
        with pytest.raises(InvalidRequest, match=r"'seed'.*'nonsense'"):
            GenerationConfig(seed=1, nonsense=2, top_k=3)


class TestUnusedSampling:
    @pytest.fixture(autouse=True)
    def first_time(self):
        _warn_of_unused_sampling.cache_clear()
        yield
        _warn_of_unused_sampling.cache_clear()

    def test_is_said_once(self, caplog):
        settle(temperature=1.5)
        settle(top_p=0.5)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "do_sample=True" in record.message

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"max_new_tokens": 3},
            {"temperature": 1.5, "do_sample": True},
            {"temperature": 1.5, "do_sample": False},
            {"temperature": 0.0, "random_seed": 1},
            {"top_k": 1},
            {"random_seed": None},
        ],
    )
    def test_what_is_greedy_on_purpose_is_left_alone(self, caplog, fields):
        settle(**fields)
        assert not caplog.records
