"""Batch managers: whose tasks pay when a hook raises, lies, waits or is written for EnergonAI."""

import asyncio
import dataclasses
import threading

import pytest

from corogen.errors import RequestFailed, StepFailed
from corogen.tasks.batching import BatchManager, SubmitEntry, TaskEntry
from tests.conftest import eventually
from tests.tasks.helpers import Lists, close_gate, open_gate, scripted


def double_all(xs):
    return [2 * x for x in xs]


class Hooked(Lists):
    """`before` and `after` are called with the uids before a batch is made, and before it is split."""

    def __init__(self, size=4, before=lambda uids: None, after=lambda uids: None):
        super().__init__(size)
        self.before, self.after = before, after

    def make_batch(self, q):
        entry, info = super().make_batch(q)
        self.before(entry.uids)
        return entry, info

    def split_batch(self, task_entry, **info):
        self.after(task_entry.uids)
        return super().split_batch(task_entry, **info)


def raise_for(uid):
    def check(uids):
        if uid in uids:
            raise KeyError("no such thing")

    return check


def outcomes(engine, count=8):
    """What becomes of `count` tasks that are submitted together, behind one that is at the worker."""
    close_gate(engine)
    handles = [engine.submit(i, i) for i in range(count)]
    open_gate(engine)
    return [handle.exception() or handle.result() for handle in handles]


def test_a_hook_that_raises_fails_what_it_took_and_nothing_else():
    with scripted(double_all, Hooked(before=raise_for(5))) as engine:
        found = outcomes(engine)
        failed = [i for i, outcome in enumerate(found) if isinstance(outcome, RequestFailed)]
        assert 5 in failed
        assert len(failed) <= 4
        assert all(found[i] == 2 * i for i in range(8) if i not in failed)
        assert "make_batch raised KeyError" in str(found[5])
        assert isinstance(found[5].__cause__, KeyError)
        assert engine.submit("next", 1).result() == 2


def test_a_split_that_raises_fails_its_batch_and_nothing_else():
    with scripted(double_all, Hooked(after=raise_for(5))) as engine:
        found = outcomes(engine)
        failed = [i for i, outcome in enumerate(found) if isinstance(outcome, RequestFailed)]
        assert 5 in failed
        assert len(failed) <= 4
        assert "split_batch raised KeyError" in str(found[5])
        assert engine.submit("next", 1).result() == 2


def test_a_split_that_raises_half_way_keeps_what_it_gave():
    class HalfWay(Lists):
        def split_batch(self, task_entry, **info):
            yield task_entry.uids[0], task_entry.batch[0]
            raise ValueError("half way")

    with scripted(double_all, HalfWay(8)) as engine:
        engine.submit("warm up", 1).result()
        found = outcomes(engine)
        assert sum(outcome == 2 * i for i, outcome in enumerate(found)) == engine.stats().batches - 1


def test_a_hook_that_raises_before_it_takes_anything_fails_the_one_whose_turn_it_was():
    class Fussy(Lists):
        def make_batch(self, q):
            if q[0].data == 3:
                raise ValueError("not this one")
            return super().make_batch(q)

    with scripted(double_all, Fussy(1)) as engine:
        found = outcomes(engine)
        assert isinstance(found[3], RequestFailed)
        assert [found[i] for i in (0, 1, 2, 4, 5, 6, 7)] == [0, 2, 4, 8, 10, 12, 14]


@pytest.mark.parametrize("lie", ["drops", "keeps", "invents", "nothing", "twice", "garbage"])
def test_a_hook_that_contradicts_itself_fails_the_tasks_concerned(lie):
    class Liar(Lists):
        def make_batch(self, q):
            if q[0].data != 0:
                return super().make_batch(q)
            first = q.popleft() if lie != "keeps" else q[0]
            uids = {
                "drops": (),
                "keeps": (first.uid,),
                "invents": (first.uid, "nobody"),
                "nothing": (),
                "twice": (first.uid, first.uid),
            }
            return "garbage" if lie == "garbage" else (TaskEntry(uids[lie], ([0],)), {})

    with scripted(double_all, Liar(4)) as engine:
        found = outcomes(engine)
        assert isinstance(found[0], RequestFailed)
        assert found[1:] == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize("result", [None, [("nobody", 1)], [], [(1,)]])
def test_tasks_for_which_a_split_has_nothing_fail(result):
    class Forgetful(Lists):
        def split_batch(self, task_entry, **info):
            return result if 5 in task_entry.uids else super().split_batch(task_entry, **info)

    with scripted(double_all, Forgetful(1)) as engine:
        found = outcomes(engine)
        assert isinstance(found[5], RequestFailed)
        assert "split_batch" in str(found[5])
        assert found[6:] == [12, 14]


def test_an_input_that_can_not_be_sent_fails_its_batch():
    with scripted() as engine:
        error = engine.submit("a", (x for x in "generator")).exception()
        assert isinstance(error, RequestFailed)
        assert "pickling the batch raised TypeError" in str(error)
        assert engine.submit("b", 1).result() == 1


def test_an_output_that_can_not_be_read_fails_its_batch():
    class Strange:
        def __reduce__(self):
            return int, ("no number",)

    with scripted(lambda x: Strange() if x else 0) as engine:
        assert isinstance(engine.submit("a", 1).exception(), RequestFailed)
        assert engine.submit("b", 0).result() == 0


# ------------------------------------------------------------------ asynchronous hooks


def test_hooks_may_be_coroutines():
    class Asynchronous(Lists):
        async def make_batch(self, q):
            await asyncio.sleep(0.001)
            return super().make_batch(q)

        async def split_batch(self, task_entry, **info):
            for part in super().split_batch(task_entry, **info):
                await asyncio.sleep(0)
                yield part

    class Awaitable(Asynchronous):
        async def split_batch(self, task_entry, **info):
            await asyncio.sleep(0.001)
            return Lists.split_batch(self, task_entry, **info)

    for manager in (Asynchronous(4), Awaitable(4)):
        with scripted(double_all, manager) as engine:
            assert outcomes(engine) == [2 * i for i in range(8)]


def test_a_slow_hook_sees_new_tasks_and_holds_up_no_results():
    class Window(Lists):
        async def make_batch(self, q):
            while len(q) < 3:
                await asyncio.sleep(0.001)
            return super().make_batch(q)

    with scripted(double_all, Window(3)) as engine:
        handles = [engine.submit(i, i) for i in range(4)]
        assert [h.result() for h in handles[:3]] == [0, 2, 4]
        assert not handles[3].done()
        engine.submit(4, 4)
        engine.submit(5, 5)
        assert handles[3].result() == 6


def test_a_task_that_is_cancelled_in_a_hooks_hands_is_not_missed():
    class Slow(Lists):
        async def make_batch(self, q):
            made = super().make_batch(q)
            self.has_them.set()
            await asyncio.sleep(0.05)
            return made

    manager = Slow(4)
    manager.has_them = threading.Event()
    with scripted(double_all, manager) as engine:
        one = engine.submit("a", 1)
        assert manager.has_them.wait(10)
        one.cancel()
        assert eventually(lambda: engine.stats().ended == {"cancelled": 1})
        assert engine.submit("b", 2).result() == 4


def test_asynchronous_hooks_that_raise():
    class Raises(Lists):
        async def make_batch(self, q):
            q[0].data  # noqa: B018
            raise ValueError("no batch")

        async def split_batch(self, task_entry, **info):
            raise ValueError("no parts")
            yield

    class SplitRaises(Raises):
        make_batch = Lists.make_batch

    for manager, words in ((Raises(), "make_batch raised"), (SplitRaises(), "split_batch raised")):
        with scripted(double_all, manager) as engine:
            assert all(isinstance(e, RequestFailed) and words in str(e) for e in outcomes(engine, 3))


def test_a_close_ends_hooks_that_wait():
    class Forever(Lists):
        async def make_batch(self, q):
            await asyncio.Event().wait()

    with scripted(double_all, Forever()) as engine:
        handle = engine.submit(1, 1)
        engine.shutdown()
        assert handle.exception() is not None


def test_hold_waits_for_more_and_its_errors_reach_the_one_whose_turn_it_was():
    class Holding(Lists):
        def hold(self, q):
            if q[0].data == "bad":
                raise ValueError("no number")
            return 0.0 if len(q) >= 3 else 30.0

    with scripted(lambda xs: xs, Holding(3)) as engine:
        first = [engine.submit(i, i) for i in range(2)]
        assert not eventually(lambda: any(h.done() for h in first), 0.05)
        engine.submit(2, 2)
        assert [h.result() for h in first] == [0, 1]
        assert "hold raised ValueError" in str(engine.submit("x", "bad").exception())


def test_a_held_batch_is_made_when_its_time_has_come():
    class Patient(Lists):
        def hold(self, q):
            return q[0].arrival + 0.05 - asyncio.get_running_loop().time()

    with scripted(lambda xs: xs, Patient(3)) as engine:
        assert engine.submit(1, 1).result() == 1
        assert engine.stats().queue_time.max_s >= 0.05


# ------------------------------------------------------------------ neighbours


def test_a_task_whose_input_the_model_refuses_harms_no_neighbour():
    def model(xs):
        if 5 in xs:
            raise ValueError("five")
        return double_all(xs)

    with scripted(model, Lists(8)) as engine:
        found = outcomes(engine, 16)
        assert isinstance(found[5], StepFailed)
        assert "ValueError: five" in str(found[5])
        assert isinstance(found[5].__cause__, ValueError)
        assert [found[i] for i in range(16) if i != 5] == [2 * i for i in range(16) if i != 5]


def test_a_batch_that_is_too_much_together_is_computed_in_parts():
    def model(xs):
        if len(xs) > 2:
            raise MemoryError("out of memory")
        return double_all(xs)

    with scripted(model, Lists(8)) as engine:
        assert outcomes(engine, 16) == [2 * i for i in range(16)]


# ------------------------------------------------------------------ as written for EnergonAI


@dataclasses.dataclass
class Padding(BatchManager):
    """The kind of manager that OPT has there: the head of the queue, and what fits to it, padded on the left."""

    max_batch_size: int = 4
    pad_token_id: int = 0

    def make_batch(self, q):
        head = q.popleft()
        uids, rows = [head.uid], [head.data["input_ids"]]
        longest = len(rows[0])
        while q and len(uids) < self.max_batch_size and q[0].data["top_k"] == head.data["top_k"]:
            entry: SubmitEntry = q.popleft()
            uids.append(entry.uid)
            rows.append(entry.data["input_ids"])
            longest = max(longest, len(rows[-1]))
        padded = [[self.pad_token_id] * (longest - len(row)) + row for row in rows]
        return TaskEntry(tuple(uids), {"input_ids": padded}), {"lengths": [len(row) for row in rows]}

    def split_batch(self, task_entry, lengths=()):
        for uid, row, length in zip(task_entry.uids, task_entry.batch, lengths, strict=True):
            yield uid, row[-length:]


def test_a_manager_written_for_energonai_runs_unchanged():
    def model(input_ids):
        assert len({len(row) for row in input_ids}) == 1
        return [[2 * i for i in row] for row in input_ids]

    with scripted(model, Padding()) as engine:
        close_gate(engine)
        data = [{"input_ids": list(range(1, n + 1)), "top_k": n % 2} for n in (3, 1, 5, 2, 4, 4)]
        handles = [engine.submit(i, d) for i, d in enumerate(data)]
        open_gate(engine)
        assert [h.result() for h in handles] == [[2 * i for i in d["input_ids"]] for d in data]
