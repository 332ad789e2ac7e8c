"""Applications built on queues: what goes in comes out, in order, whatever happens."""

import queue
import threading
import time

import pytest

from corogen.adapters import QueueAdapter
from corogen.errors import EmptyPrompt, EngineClosed, InvalidRequest, StepFailed, WorkerDied
from corogen.params import GenerationConfig
from tests.adapters.helpers import ENDLESS, SHORT, assert_nothing_runs, expected, make_pipe, scripted, slowly
from tests.conftest import eventually

pytestmark = pytest.mark.usefixtures("no_threads_left")


def pair(inbox_size=0, outbox_size=0):
    return queue.Queue(inbox_size), queue.Queue(outbox_size)


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue, queue.LifoQueue])
def test_queues_of_any_kind(kind):
    with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        inbox, outbox = kind(), kind()
        bridge.add(inbox, outbox)
        inbox.put("hello")
        assert outbox.get(timeout=5).text == expected("hello")


def test_what_is_no_pipeline_or_no_queue_is_refused_at_once():
    with pytest.raises(InvalidRequest, match="must be a Pipeline") as caught:
        QueueAdapter("demo")
    assert caught.value.param == "pipe"
    with scripted() as pipe, QueueAdapter(pipe) as bridge:
        for name, queues in (("inbox", ([], queue.Queue())), ("outbox", (queue.Queue(), object()))):
            with pytest.raises(InvalidRequest, match=f"{name} must be a queue") as caught:
                bridge.add(*queues)
            assert caught.value.param == name


@pytest.mark.parametrize("item", [("hi", 5), ("hi", SHORT, 3), ("hi", {}, 3), ([{"role": "user", "content": "x"}], 5)])
def test_a_pair_with_something_else_than_a_config_says_what_a_pair_is(item):
    with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        inbox.put(item)
        error = outbox.get(timeout=5)
        assert isinstance(error, InvalidRequest)
        assert "a pair of a prompt and a GenerationConfig" in str(error)
        inbox.put((1, 2, 3))
        assert outbox.get(timeout=5).input_token_len == 3, "a tuple of token ids is a prompt"


def test_answers_come_in_order_although_requests_run_at_the_same_time():
    with slowly() as pipe, QueueAdapter(pipe) as bridge:
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        lengths = [40, 1, 20, 3, 30, 2, 10, 5]
        for i, length in enumerate(lengths):
            inbox.put((f"p{i}", GenerationConfig(max_new_tokens=length)))
        answers = [outbox.get(timeout=5) for _ in lengths]
        assert [a.generate_token_len for a in answers] == lengths
        assert max(record.running for record in pipe.step_log(4096)) > 3


def test_a_bad_item_gets_its_error_in_its_place_and_the_pair_lives_on():
    with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        for item in ["one", "", None, 42, ("two", "no config"), "x" * 5000, ("three", GenerationConfig(n=0)), "four"]:
            inbox.put(item)
        answers = [outbox.get(timeout=5) for _ in range(8)]
        kinds = [type(answer).__name__ for answer in answers]
        assert answers[0].text == expected("one")
        assert kinds[1:4] == ["EmptyPrompt", "InvalidRequest", "InvalidRequest"]
        assert isinstance(answers[4], list), "a pair of strings is a list of prompts"
        assert kinds[5] == "PromptTooLong"
        assert isinstance(answers[6], InvalidRequest)
        assert answers[7].text == expected("four")


def test_an_item_may_bring_its_own_settings_or_none():
    with scripted() as pipe, QueueAdapter(pipe, GenerationConfig(max_new_tokens=3)) as bridge:
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        inbox.put(("a", GenerationConfig(max_new_tokens=5)))
        inbox.put(("a", None))
        inbox.put([5, 6, 7])
        inbox.put(["a", "b"])
        assert [outbox.get(timeout=5).generate_token_len for _ in range(3)] == [5, 3, 3]
        assert [answer.index for answer in outbox.get(timeout=5)] == [0, 1]


def test_a_failing_step_comes_out_as_its_error():
    with (
        scripted(fake={"fail_at": {3: RuntimeError("boom")}}, on_worker_failure="fail") as pipe,
        QueueAdapter(pipe, SHORT) as bridge,
    ):
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        inbox.put("x")
        assert isinstance(outbox.get(timeout=5), StepFailed)
        inbox.put("again")
        assert outbox.get(timeout=5).text == expected("again")


def test_a_dead_worker_comes_out_for_what_ran():
    fake = {"fail_at": {3: WorkerDied(0, 1)}}
    with make_pipe(fake=fake, on_worker_failure="fail") as pipe, QueueAdapter(pipe, SHORT) as bridge:
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        inbox.put("x")
        assert isinstance(outbox.get(timeout=5), WorkerDied)
        inbox.put("y")
        assert outbox.get(timeout=5).text == expected("y")


def test_a_closed_pipeline_takes_no_pairs():
    pipe = make_pipe()
    bridge = QueueAdapter(pipe)
    pipe.close()
    with pytest.raises(EngineClosed):
        bridge.add(*pair())


def test_a_full_outbox_holds_up_nobody_else():
    with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        inbox, outbox = pair(outbox_size=1)
        other, answers = pair()
        bridge.add(inbox, outbox)
        bridge.add(other, answers)
        for i in range(20):
            inbox.put(f"p{i}")
        for i in range(20):
            other.put(f"q{i}")
        assert [answers.get(timeout=5).text for _ in range(20)] == [expected(f"q{i}") for i in range(20)]
        assert pipe.infer("direct", SHORT).text == expected("direct")
        assert [outbox.get(timeout=5).text for _ in range(20)] == [expected(f"p{i}") for i in range(20)]


def test_a_full_inbox_makes_its_clients_wait_and_loses_nothing():
    with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        inbox, outbox = pair(inbox_size=1)
        bridge.add(inbox, outbox)
        for i in range(50):
            inbox.put(f"p{i}", timeout=5)
        assert [outbox.get(timeout=5).text for _ in range(50)] == [expected(f"p{i}") for i in range(50)]


def test_join_waits_until_everything_is_answered():
    with slowly() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        for i in range(10):
            inbox.put(f"p{i}")
        inbox.join()
        assert outbox.qsize() == 10


class TestAddingAndRemoving:
    def test_while_others_run(self):
        with slowly() as pipe, QueueAdapter(pipe, SHORT) as bridge:
            steady = pair()
            bridge.add(*steady)
            for round_ in range(10):
                steady[0].put(f"steady {round_}")
                passing = pair()
                bridge.add(*passing)
                for i in range(5):
                    passing[0].put(f"{round_} {i}")
                bridge.remove(passing[0])
                assert [passing[1].get(timeout=5).text for _ in range(5)] == [
                    expected(f"{round_} {i}") for i in range(5)
                ]
                passing[0].put("unheard")
            assert [steady[1].get(timeout=5).text for _ in range(10)] == [expected(f"steady {i}") for i in range(10)]
            assert passing[0].get(timeout=5) == "unheard"

    def test_an_inbox_is_served_once(self):
        with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
            inbox, outbox = pair()
            bridge.add(inbox, outbox)
            with pytest.raises(InvalidRequest, match="served already"):
                bridge.add(inbox, queue.Queue())
            bridge.remove(inbox)
            bridge.remove(inbox)
            bridge.remove(queue.Queue())
            bridge.add(inbox, outbox)
            inbox.put("x")
            assert outbox.get(timeout=5).text == expected("x")

    def test_two_adapters_may_share_an_inbox_and_stop_apart(self):
        with scripted() as pipe, QueueAdapter(pipe, SHORT) as one, QueueAdapter(pipe, SHORT) as two:
            inbox, outbox = pair()
            one.add(inbox, outbox)
            two.add(inbox, outbox)
            one.close()
            inbox.put("x")
            assert outbox.get(timeout=5).text == expected("x")

    def test_several_inboxes_may_share_an_outbox(self):
        with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
            outbox, inboxes = queue.Queue(), [queue.Queue() for _ in range(3)]
            for i, inbox in enumerate(inboxes):
                bridge.add(inbox, outbox)
                inbox.put(f"p{i}")
            assert {outbox.get(timeout=5).text for _ in range(3)} == {expected(f"p{i}") for i in range(3)}


class TestClosing:
    def test_answers_what_was_accepted(self):
        with slowly() as pipe:
            bridge = QueueAdapter(pipe, SHORT)
            pairs = [pair() for _ in range(3)]
            for p in pairs:
                bridge.add(*p)
                for i in range(5):
                    p[0].put(f"p{i}")
            assert eventually(lambda: all(p[0].empty() for p in pairs))
            bridge.close()
            bridge.close()
            for _, outbox in pairs:
                answers = [outbox.get_nowait() for _ in range(5)]
                assert all(isinstance(a, EngineClosed) or a.text == expected(f"p{i}") for i, a in enumerate(answers))
            with pytest.raises(EngineClosed, match="queue adapter is closed"):
                bridge.add(*pair())

    def test_aborts_what_does_not_end_in_time(self):
        with slowly() as pipe:
            bridge = QueueAdapter(pipe, ENDLESS)
            inbox, outbox = pair()
            bridge.add(inbox, outbox)
            inbox.put("endless")
            assert eventually(lambda: pipe.stats().running)
            bridge.close(timeout_s=0)
            assert outbox.get_nowait().finish_reason == "abort"
            assert_nothing_runs(pipe)

    def test_after_the_pipeline_was_closed(self):
        pipe = make_pipe(fake={"step_time_s": 30.0})
        bridge = QueueAdapter(pipe, SHORT)
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        inbox.put("x")
        assert eventually(lambda: pipe.engine.request_ids())
        pipe.close()
        inbox.put("y")
        assert [type(outbox.get(timeout=5)) for _ in range(2)] == [EngineClosed] * 2
        bridge.close()

    def test_is_bounded_when_nobody_empties_an_outbox(self, monkeypatch):
        from corogen.adapters import queues

        monkeypatch.setattr(queues, "_FLUSH_S", 0.01)
        with scripted() as pipe:
            bridge = QueueAdapter(pipe, SHORT)
            inbox, outbox = pair(outbox_size=1)
            bridge.add(inbox, outbox)
            for i in range(3):
                inbox.put(f"p{i}")
            assert eventually(outbox.full)
            start = time.monotonic()
            bridge.close(timeout_s=0.01)
            assert time.monotonic() - start < 2
            for _ in range(3):
                outbox.get(timeout=5)


def test_settings_of_a_wrong_type_are_refused():
    with scripted() as pipe, pytest.raises(InvalidRequest, match="GenerationConfig"):
        QueueAdapter(pipe, {"max_new_tokens": 3})


def test_nothing_runs_while_queues_are_empty():
    with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        for _ in range(20):
            bridge.add(*pair())
        used = time.process_time()
        threading.Event().wait(0.3)
        assert time.process_time() - used < 0.03


def test_an_empty_prompt_is_an_item_like_any_other():
    with scripted() as pipe, QueueAdapter(pipe, SHORT) as bridge:
        inbox, outbox = pair()
        bridge.add(inbox, outbox)
        inbox.put("")
        assert isinstance(outbox.get(timeout=5), EmptyPrompt)
