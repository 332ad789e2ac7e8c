"""Everything that is wrong with a config is said at once; what LMDeploy has and corogen has not is refused by name."""

import pytest

from corogen.config import THREAD_SAFE_MESSAGE, EngineConfig, PytorchEngineConfig, check_config
from corogen.errors import ConfigError, CorogenError


def problems(config):
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    return caught.value.problems


def test_the_defaults_are_right():
    check_config(EngineConfig())
    assert PytorchEngineConfig is EngineConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, v) for name in ("tp", "pp") for v in (0, -1, 1.0, "1", None, True)],
        *[("block_size", v) for v in (0, -1, 1.0, "1", True)],
        *[(name, v) for name in ("session_len", "max_batch_size") for v in (0, -5, 2.5, "x", True)],
        *[("session_len", v) for v in (1,)],
        *[("max_prefill_token_num", v) for v in (0, "x")],
        *[("num_gpu_blocks", v) for v in (-1, None, 1.5)],
        *[("queue_size", v) for v in (-1, None, "x")],
        *[("num_threads", v) for v in (0, 1.5)],
        *[("cache_max_entry_count", v) for v in (0, 1, -0.1, 1.5, float("nan"), "0.8", None, True)],
        *[("start_timeout_s", v) for v in (0, -1, float("nan"), float("inf"), "x", True)],
        *[("step_timeout_s", v) for v in (0, "x")],
        *[("dtype", v) for v in ("float64", None, 3, ["auto"])],
        *[("device_type", v) for v in ("tpu", None)],
        *[("distributed_executor_backend", v) for v in ("ray ", 3)],
        *[("enable_prefix_caching", v) for v in (1, None, "yes")],
        *[("eager_mode", v) for v in (0, None)],
        *[("revision", v) for v in (3,)],
        *[("download_dir", v) for v in (3,)],
        *[("chat_template", v) for v in (3, ["x"])],
        *[("generation_config", v) for v in ("", None, 3)],
        *[("hf_overrides", v) for v in ("x", [1])],
        *[("devices", v) for v in ([], [-1], ["0"], 0, [True])],
    ],
)
def test_a_bad_value_is_named(field, value):
    (problem,) = problems(EngineConfig(**{field: value}))
    assert field in problem
    assert repr(value) in problem


def test_several_faults_are_listed_at_once():
    found = problems(EngineConfig(tp=0, dtype="int3", cache_max_entry_count=2, devices=[], thread_safe=True))
    assert len(found) == 5
    for name in ("tp", "dtype", "cache_max_entry_count", "devices", "thread_safe"):
        assert any(name in problem for problem in found)


def test_the_error_shows_each_problem_on_a_line_of_its_own():
    with pytest.raises(ConfigError) as caught:
        check_config(EngineConfig(tp=0, pp=-1))
    assert str(caught.value).count("\n  - ") == 2
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CorogenError)


def test_more_than_one_device_is_refused_for_now():
    (problem,) = problems(EngineConfig(tp=2, pp=2))
    assert "tp=2, pp=2" in problem


@pytest.mark.parametrize("name", ["no/such.jinja", "chatml", "", "~/there is no such file", "x" * 5000])
def test_a_chat_template_that_names_no_file_is_refused_before_anything_is_loaded(name):
    (problem,) = problems(EngineConfig(chat_template=name))
    assert problem.startswith("chat_template=")


def test_a_chat_template_may_be_text_or_a_file(tmp_path):
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    for good in ("{{ messages }}", "two\nlines", str(tmp_path / "a.jinja")):
        check_config(EngineConfig(chat_template=good))


class TestThreadSafe:
    def test_true_is_refused_with_what_to_use_instead(self):
        assert problems(EngineConfig(thread_safe=True)) == [THREAD_SAFE_MESSAGE]
        for way in ("async_batch_infer", "pipe.infer", "QueueAdapter"):
            assert way in THREAD_SAFE_MESSAGE

    def test_also_when_it_is_set_later(self):
        config = EngineConfig()
        config.thread_safe = True
        assert problems(config) == [THREAD_SAFE_MESSAGE]

    def test_false_passes(self):
        check_config(EngineConfig(thread_safe=False))


class TestForeignFields:
    @pytest.mark.parametrize(
        ("field", "value"), [("quant_policy", 8), ("dp", 2), ("adapters", {"a": "b"}), ("role", "prefill"), ("ep", 4)]
    )
    def test_a_setting_of_lmdeploy_is_refused_by_name(self, field, value):
        with pytest.raises(ConfigError, match=f"{field}=.*LMDeploy"):
            EngineConfig(**{field: value})

    def test_its_default_passes(self):
        config = EngineConfig(quant_policy=0, dp=1, adapters=None, tp=1)
        assert config == EngineConfig()
        assert not hasattr(config, "quant_policy")

    def test_a_misspelt_name_is_refused_with_a_suggestion(self):
        with pytest.raises(ConfigError, match="did you mean 'max_batch_size'"):
            EngineConfig(max_batchsize=3)

    def test_all_unknown_names_are_listed(self):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(quant_policy=4, nonsense=1, tp=1)
        assert len(caught.value.problems) == 2


@pytest.mark.parametrize("config", [None, {"tp": 1}, "auto"])
def test_a_config_of_another_type_is_named(config):
    (problem,) = problems(config)
    assert type(config).__name__ in problem
