"""A runner's own promises: phases, slots, independence of rows, sampling inside steps."""

from __future__ import annotations

import pytest
import torch

from corogen.errors import ConfigError
from corogen.wire.messages import PrefillRow, Sampling, SlotBlocks, SlotInit, StepInput
from corogen.workers.runner import Runner
from tests.model.conftest import ModelMaker
from tests.model.driver import Driver, Sequence_, load, make_spec
from tests.model.reference import random_prompts, reference

SEEDED = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=5)
PENALISED = Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)


@pytest.fixture(scope="module")
def runner(make_model: ModelMaker) -> Runner:
    return load(make_model("llama"))[0]


def test_ready_tells_the_facts(make_model: ModelMaker) -> None:
    phases: list[str] = []
    runner = Runner(make_spec(make_model("llama"), num_blocks=7), lambda p: phases.append(p.name))
    ready = runner.load()
    assert (ready.num_blocks, ready.max_positions, ready.vocab_size) == (7, 256, 512)
    assert (ready.dtype, ready.device, ready.warnings) == ("float32", "cpu", [])
    assert list(dict.fromkeys(phases)) == ["build", "load", "cache", "warmup"]
    assert set(ready.phases) == {"build", "load", "cache", "warmup"}


def test_the_default_cache_is_what_all_slots_can_use(make_model: ModelMaker) -> None:
    _, ready = load(make_model("llama"), num_blocks=None, max_slots=3)
    assert ready.num_blocks == 3 * 256 // 16
    _, ready = load(make_model("llama"), num_blocks=None, max_slots=3, session_len=100)
    assert ready.num_blocks == 3 * 7


def test_a_cache_without_room_for_one_block_is_refused(make_model: ModelMaker) -> None:
    with pytest.raises(ConfigError, match="no KV block fits"):
        load(make_model("llama"), num_blocks=None, cache_fraction=1e-9)


def test_float16_on_a_cpu_is_refused_with_advice(make_model: ModelMaker) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        load(make_model("llama"), dtype="float16")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_decode_row_is_bitwise_the_same_alone_and_together(family: str, make_model: ModelMaker) -> None:
    runner, _ = load(make_model(family), num_threads=2)
    prompts = random_prompts(5, 17, 63, 64, 100, 200)
    together = Driver(runner).generate(prompts, 4)
    for prompt, other in zip(prompts, together, strict=True):
        (alone,) = Driver(runner).generate([prompt], 4)
        assert all(torch.equal(a, b) for a, b in zip(alone.logits[1:], other.logits[1:], strict=True))


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED, PENALISED])
def test_a_restarted_sequence_continues_with_the_same_tokens(sampling: Sampling, runner: Runner) -> None:
    (prompt,) = random_prompts(23)
    (whole,) = Driver(runner).generate([prompt], 12, [sampling])
    driver, cut = Driver(runner), Sequence_(3, prompt, sampling)
    driver.finish([cut], 5)
    cut.restart()
    driver.finish([cut], 12)
    assert cut.new == whole.new


def test_sampled_rows_do_not_depend_on_batch_mates_or_slots(runner: Runner) -> None:
    prompts = random_prompts(9, 30, 31, 70)
    mates = [Sampling(), SEEDED, Sampling(temperature=1.5, seed=9), PENALISED]
    together = Driver(runner).generate(prompts, 10, mates)
    backwards = Driver(runner).generate(prompts[::-1], 10, mates[::-1])[::-1]
    assert [s.new for s in together] == [s.new for s in backwards]
    for prompt, sampling, other in zip(prompts, mates, together, strict=True):
        (alone,) = Driver(runner).generate([prompt], 10, [sampling])
        assert alone.new == other.new


def test_penalties_are_those_of_transformers(runner: Runner, make_model: ModelMaker) -> None:
    prompts = random_prompts(12, 30)
    model = reference(make_model("llama"))
    for s in Driver(runner).generate(prompts, 20, [Sampling(repetition_penalty=1.4)] * 2):
        out = model.generate(
            torch.tensor([s.tokens[: s.prompt_len]]),
            attention_mask=torch.ones(1, s.prompt_len, dtype=torch.long),
            do_sample=False,
            repetition_penalty=1.4,
            max_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert s.new == out[0, s.prompt_len :].tolist()


def test_suppressed_ids_return_after_their_position(runner: Runner) -> None:
    (prompt,) = random_prompts(10)
    (plain,) = Driver(runner).generate([prompt], 1)
    first = plain.new[0]
    (held,) = Driver(runner).generate([prompt], 4, [Sampling(suppress_ids=(first,), suppress_until=12)])
    assert first not in held.new[:2]
    (later,) = Driver(runner).generate([prompt], 1, [Sampling(suppress_ids=(first,), suppress_until=10)])
    assert later.new == [first]


def test_a_cached_prefix_gives_the_same_tokens_and_counts(runner: Runner) -> None:
    (prompt,) = random_prompts(40)
    for sampling in (Sampling(), PENALISED):
        (whole,) = Driver(runner).generate([prompt], 1, [sampling])
        fill = StepInput(
            0, 0, [SlotInit(0, 40, 0, Sampling())], [SlotBlocks(0, [9, 4, 7])], [], [PrefillRow(0, 0, prompt, True)]
        )
        runner.launch(fill).wait()
        hit = StepInput(
            1,
            0,
            [SlotInit(1, 40, 32, sampling, tuple(prompt[:32]))],
            [SlotBlocks(1, [9, 4, 2])],
            [],
            [PrefillRow(1, 32, prompt[32:], True)],
        )
        assert runner.launch(hit).wait() == whole.new


def test_a_step_without_samples_returns_nothing(runner: Runner) -> None:
    step = StepInput(
        0, 0, [SlotInit(0, 40, 0, Sampling())], [SlotBlocks(0, [1])], [], [PrefillRow(0, 0, [5] * 10, False)]
    )
    assert runner.launch(step).wait() == []


def test_a_failed_step_leaves_the_other_slots_as_they_were(runner: Runner) -> None:
    (prompt,) = random_prompts(20)
    (whole,) = Driver(runner).generate([prompt], 6)
    driver, s = Driver(runner), Sequence_(0, prompt)
    driver.finish([s], 3)
    with pytest.raises(RuntimeError, match="slot 5"):
        runner.launch(StepInput(99, 0, [], [], [0, 5], []))
    driver.finish([s], 6)
    assert s.new == whole.new


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_step_beyond_the_last_position_harms_nobody(family: str, make_model: ModelMaker) -> None:
    """One may be under way when a sequence ends where the context ends."""
    runner, _ = load(make_model(family))
    prompts = random_prompts(250, 20)
    (wanted,) = Driver(runner).generate(prompts[1:], 12)
    full, short = Driver(runner).generate(prompts, 12)
    assert len(full.new) == 12
    assert short.new == wanted.new


def test_loading_leaves_torch_as_it_was(make_model: ModelMaker) -> None:
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    load(make_model("llama"))
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == before
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
