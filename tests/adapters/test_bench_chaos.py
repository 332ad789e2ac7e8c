"""Measurements of faults, over scripted workers that die: what they count, and that they notice what must not be."""

import functools
import itertools
import json
from collections import Counter

import pytest

from corogen.adapters.bench import cancel, chaos, cycles, engines, soak
from corogen.adapters.bench.crowd import LEFT, Crowd, Outcome
from corogen.adapters.bench.killer import Death, Killer
from corogen.adapters.bench.questions import WAYS_TO_LEAVE, Job, Leave, Question, make_jobs, make_questions
from corogen.adapters.bench.tally import Tally, first_difference
from corogen.adapters.pipeline import Pipeline
from corogen.config import EngineConfig
from corogen.errors import ConfigError, EngineClosed, WorkerDied
from corogen.params import GenerationConfig
from corogen.testing import FakeExecutor
from tests.adapters.cli_helpers import corogen
from tests.adapters.helpers import make_pipe
from tests.conftest import eventually
from tests.engine.helpers import tokenizer

ENDLESS = GenerationConfig(max_new_tokens=None, ignore_eos=True)


def opener(**config):
    return functools.partial(engines.scripted, EngineConfig(max_batch_size=8, **config))


def encode(text):
    return list(text.encode())


# ------------------------------------------------------------------ what is asked


def test_the_same_seed_asks_the_same_in_the_same_way():
    def plan(seed):
        questions = make_questions(20, encode, output_len=9, seed=seed)
        return list(itertools.islice(make_jobs(questions, cancel_rate=0.3, leave_within_s=1.0, seed=seed), 50))

    assert plan(3) == plan(3)
    assert plan(3) != plan(4)


def test_questions_differ_and_half_of_them_sample_with_a_seed():
    questions = make_questions(40, encode, output_len=9)
    assert len({tuple(question.prompt_ids) for question in questions}) == 40
    explicit = [question.config.explicit() for question in questions]
    assert sum(config.get("do_sample", False) and config["random_seed"] >= 0 for config in explicit) == 20
    assert all(config["ignore_eos"] and 2 <= config["max_new_tokens"] <= 9 for config in explicit)


def test_jobs_come_from_every_caller_and_leave_in_every_way():
    questions = make_questions(10, encode, output_len=9)
    jobs = list(itertools.islice(make_jobs(questions, cancel_rate=0.3, leave_within_s=1.0), 3000))
    assert {job.caller for job in jobs} == set(WAYS_TO_LEAVE)
    ways = {(job.caller, job.leave.how) for job in jobs if job.leave}
    assert ways == {(caller, how) for caller, all_ways in WAYS_TO_LEAVE.items() for how in all_ways}
    assert 0.27 < sum(job.leave is not None for job in jobs) / 3000 < 0.33
    assert len({job.id for job in jobs}) == 3000


# ------------------------------------------------------------------ callers

CALLERS = [(caller, how) for caller, ways in WAYS_TO_LEAVE.items() for how in ways]


def run(pipe, *jobs, patience_s=10.0):
    outcomes = []
    with Crowd(pipe, 8) as crowd:
        stuck = crowd.run(iter(jobs), patience_s=patience_s, on_outcome=outcomes.append)
    return outcomes, stuck


@pytest.fixture
def slow_pipe():
    with make_pipe(fake={"step_time_s": 0.001, "max_positions": 20_000}) as pipe:
        yield pipe


@pytest.mark.parametrize(("caller", "how"), CALLERS)
@pytest.mark.parametrize("leave", [(0, 0.0), (3, 0.02)], ids=["at once", "later"])
def test_every_way_to_leave_ends_an_endless_request(slow_pipe, caller, how, leave):
    too_early = leave[1] == 0 and (caller, how) == ("await", "abort")  # the id is not known yet: nothing happens
    config = GenerationConfig(max_new_tokens=5) if too_early else ENDLESS
    job = Job("a", Question(0, [65, 66, 67], config), caller, Leave(how, *leave))
    (outcome,), stuck = run(slow_pipe, job)
    assert not stuck
    assert outcome.kind == ("answered" if too_early else "cancelled"), outcome
    assert outcome.ids == ([65, 66, 67] * len(outcome.ids))[: len(outcome.ids)]
    assert eventually(lambda: slow_pipe.stats().running == 0)


@pytest.mark.parametrize("caller", WAYS_TO_LEAVE)
def test_every_caller_brings_the_whole_answer(slow_pipe, caller):
    job = Job("a", Question(0, [65, 66], GenerationConfig(max_new_tokens=5)), caller, None)
    (outcome,), _ = run(slow_pipe, job)
    assert (outcome.kind, outcome.ids) == ("answered", [65, 66, 65, 66, 65])


@pytest.mark.parametrize("caller", WAYS_TO_LEAVE)
def test_a_refused_request_is_a_failure_of_its_own(slow_pipe, caller):
    jobs = [Job(f"{i}", Question(0, ids, GenerationConfig(max_new_tokens=2)), caller, None)
            for i, ids in enumerate(([65], [10**6], [66]))]  # fmt: skip
    outcomes, stuck = run(slow_pipe, *jobs)
    assert not stuck
    assert {outcome.job.id: outcome.kind for outcome in outcomes} == {"0": "answered", "1": "failed", "2": "answered"}


def test_what_does_not_end_in_time_is_stuck(slow_pipe):
    jobs = [Job(caller, Question(0, [65], ENDLESS), caller, None) for caller in WAYS_TO_LEAVE]
    outcomes, stuck = run(slow_pipe, *jobs, patience_s=0.05)
    assert outcomes == []
    assert {job.id for job in stuck} == set(WAYS_TO_LEAVE)


# ------------------------------------------------------------------ counting


def outcome(end, ids, leave=None):
    return Outcome(Job("a", Question(0, [1], ENDLESS), "stream", leave), end, ids)


def test_a_tally_wants_whole_answers_and_for_those_who_left_a_beginning():
    tally = Tally([[1, 2, 3]])
    leave = Leave("break", 1, 0.0)
    good = [outcome("length", [1, 2, 3]), outcome(LEFT, [1, 2], leave), outcome("abort", [], leave)]
    for one in good:
        tally.note(one)
    assert tally.problems([]) == []
    bad = [outcome("length", [1, 2]), outcome("length", [1, 5, 3]), outcome(LEFT, [2], leave), outcome("abort", [1])]
    for one in [*bad, outcome(WorkerDied(0, -9), [1])]:
        tally.note(one)
    found = tally.figures([])
    assert (found["answered"], found["cancelled"], found["different"], found["failed"]) == (3, 3, 3, 2)
    assert [one["place"] for one in found["differences"]] == [2, 1, 0]
    assert "WorkerDied" in found["failures"][1]
    assert tally.problems([good[0].job]) == [
        "2 requests are failed",
        "3 requests are different",
        "1 requests are stuck",
    ]


def test_first_difference_is_a_place():
    assert first_difference([1, 2], [1, 2, 3], whole=False) is None
    assert first_difference([1, 2], [1, 2, 3], whole=True) == 2
    assert first_difference([1, 2, 3, 4], [1, 2, 3], whole=False) == 3


def test_the_way_back_has_two_parts_and_idle_kills_have_none():
    deaths = [Death(10.0, True, 10.1, 12.0, 12.5), Death(20.0, False, 20.1, 22.0, 90.0), Death(30.0, True, 30.1)]
    found = chaos.resume_figures(deaths)
    assert found["measured"] == 1
    assert {name: found[name]["max"] for name in ("total", "restart", "prefill")} == {
        "total": 2.5,
        "restart": 2.0,
        "prefill": 0.5,
    }


# ------------------------------------------------------------------ the killer


async def test_a_killer_waits_from_readiness_and_stops_when_disarmed():
    killer = Killer(FakeExecutor())
    failures = Counter()
    killer.on_result = lambda result: None
    killer.on_failure = lambda error: failures.update([type(error).__name__])
    with engines.scripted(EngineConfig()) as (pipe, killer):
        future = pipe.submit([65, 66], ENDLESS)
        pipe.thread.run(killer.arm(0.01, lambda: True))
        assert eventually(lambda: pipe.stats().restarts >= 3)
        pipe.thread.run(killer.disarm(5.0))
        restarts = pipe.stats().restarts
        assert len(killer.deaths) == restarts
        assert all(death.figures() for death in killer.deaths[:-1])
        future.cancel()


def test_workers_are_not_killed_before_they_have_sampled_a_token_while_there_is_work():
    executor = Killer(FakeExecutor(lambda prompt: prompt * 9, step_time_s=0.02))
    with Pipeline(executor=executor, tokenizer=tokenizer()) as pipe:
        future = pipe.submit([65, 66], GenerationConfig(max_new_tokens=6))
        pipe.thread.run(executor.arm(0.001, lambda: bool(pipe.engine.request_ids())))
        assert future.result().token_ids == [65, 66] * 3
        deaths = [death for death in executor.deaths if death.with_work]
        assert len(deaths) >= 2
        assert all(death.tokens for death in deaths)


def test_a_killed_pipeline_that_is_closed_leaves_no_timer(no_threads_left):
    with engines.scripted(EngineConfig()) as (pipe, killer):
        pipe.thread.run(killer.arm(0.001, lambda: False))
        assert eventually(lambda: pipe.stats().restarts >= 2)


# ------------------------------------------------------------------ the measurements


def test_chaos_finds_nothing_wrong_with_scripted_deaths():
    said = []
    settings = chaos.Settings(requests=120, kill_every_s=0.03, cancel_rate=0.4, patience_s=20.0, seed=5)
    found = chaos.measure(opener(), settings, say=said.append)
    assert found["problems"] == []
    assert found["answered"] + found["cancelled"] == 120
    assert found["cancelled"] > 20
    assert found["kills"] == found["restarts"] >= 1
    assert (found["open"]["running"], found["open"]["blocks_used"]) == (0, 0)
    assert len(said) >= 2


class Forgetful(FakeExecutor):
    """After a death the worker goes on with other tokens."""

    starts = 0

    async def start(self, spec, on_phase):
        self.starts += 1
        return await super().start(spec, on_phase)

    def compute(self, step):
        tokens = super().compute(step)
        return tokens if self.starts == 1 else [66 + (token % 2) for token in tokens]


def test_chaos_notices_other_tokens(monkeypatch):
    monkeypatch.setattr(engines, "FakeExecutor", Forgetful)
    found = chaos.measure(opener(), chaos.Settings(requests=40, kill_every_s=0.02, patience_s=20.0))
    assert found["different"] > 0
    assert any("different" in line for line in found["problems"])
    assert found["differences"][0]["asked_again"].startswith("other than expected")


class Deaf(FakeExecutor):
    """Does not answer any more once it has died."""

    def submit(self, step):
        if not self.deaf:
            super().submit(step)

    deaf = False

    def die(self, exit_code=-9):
        super().die(exit_code)
        self.deaf = True


def test_chaos_notices_who_is_stuck(monkeypatch):
    monkeypatch.setattr(engines, "FakeExecutor", Deaf)
    monkeypatch.setattr(chaos, "still_open", lambda *given: chaos.Left({}, ["everything is"]))
    found = chaos.measure(opener(), chaos.Settings(requests=40, kill_every_s=0.02, patience_s=0.2))
    assert 0 < found["stuck"] <= 8
    assert found["problems"][-1] == "everything is"
    assert len(found["stuck_requests"]) == found["stuck"]


def test_cancel_leaves_the_pool_intact_and_frees_blocks_within_the_steps_under_way():
    settings = cancel.Settings(requests=150, leave_within_s=0.02, patience_s=20.0)
    found = cancel.measure(opener(), settings)
    assert found["problems"] == []
    assert found["cancelled"] >= 150
    freed = found["break_to_free_blocks"]
    assert freed["steps_planned_after"]["max"] == 0
    assert freed["results_until_free"]["max"] <= freed["steps_under_way"]["max"] <= 2
    assert found["memory"]["this process"]["bytes_per_request"] is not None


def test_a_soak_of_a_second_writes_lines_and_ends():
    found = soak.measure(opener(), soak.Settings(minutes=1 / 60, kill_every_s=0.05, patience_s=20.0))
    assert found["problems"] == []
    assert found["kills"]
    assert found["step_errors"]
    assert len(found["lines"]) > 5
    assert found["lines"][-1]["answered"] == found["answered"] > 0


def test_cycles_leave_nothing():
    found = cycles.measure(opener(), 3)
    assert found["problems"] == []
    assert [row["cycle"] for row in found["cycles"]] == [1, 2, 3]
    assert {row["threads"] for row in found["cycles"]} == {found["before"]["threads"]}


def test_a_model_without_a_tokenizer_is_refused():
    with make_pipe() as pipe:
        pipe.engine.admission.tokenizer = None
        with pytest.raises(ConfigError, match="tokenizer"):
            chaos.ask_about(pipe, 1, 5, 0)


# ------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("chaos", "-m", "scripted", "--requests", "20", "--kill-every", "0.02"), "seconds from a kill"),
        (("cancel", "--requests", "20", "--leave-within-s", "0.01"), "results until its blocks are free"),
        (("soak", "--minutes", "0.005", "--kill-every", "0.05"), "exceptions in steps"),
        (("cycles", "-m", "scripted", "--count", "2"), "nothing is left"),
        (
            ("steps", "--spin", "--streams", "2", "--output-len", "20", "--repeat", "1"),
            "beside a spinning Python thread",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_measurement_is_a_command_with_a_table(words, shown):
    done = corogen("bench", *words, "-q", "--log-level", "error")
    assert done.exit_code == 0, done.output
    assert shown in done.stdout


def test_results_can_be_json():
    done = corogen("bench", "chaos", "-m", "scripted", "--requests", "10", "--json", "-q", "--log-level", "error")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert (found["benchmark"], found["problems"], found["settings"]["requests"]) == ("chaos", [], 10)


def test_problems_are_the_exit_code(monkeypatch):
    monkeypatch.setattr(engines, "FakeExecutor", Forgetful)
    done = corogen(
        "bench", "chaos", "-m", "scripted", "--requests", "40", "--kill-every", "0.02", "-q", "--log-level", "error"
    )
    assert done.exit_code == 1
    assert "PROBLEM: " in done.stdout
    assert "differs at token" in done.stdout


def test_after_the_close_every_caller_fails_and_none_is_stuck():
    pipe = make_pipe()
    with Crowd(pipe, 8) as crowd:
        pipe.close()
        outcomes = []
        jobs = [Job(caller, Question(0, [65], ENDLESS), caller, None) for caller in WAYS_TO_LEAVE]
        assert crowd.run(iter(jobs), patience_s=5.0, on_outcome=outcomes.append) == []
    assert all(isinstance(one.end, EngineClosed) for one in outcomes)
