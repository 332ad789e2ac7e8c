"""The scheduler against a simulated device: right tokens, bounded steps, nothing lost, whatever the order."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from corogen.schedule import BlockPool, Scheduler, Sequence, Status
from corogen.testing import FakeExecutor
from corogen.wire.messages import Sampling

BLOCK = 4


def answer_to(prompt):
    """Depends on the whole prompt, so that a wrong prefix hit or a lost token shows."""
    seed = sum((i + 1) * t for i, t in enumerate(prompt))
    return [(seed + 7 * i) % 500 for i in range(64)]


def sequence(prompt, new, **options):
    return Sequence(prompt, Sampling(), new, **options)


class Simulation:
    """A scheduler and a device, with `depth` steps in flight."""

    def __init__(self, *, blocks, slots, budget, depth=2, prefix=True):
        self.scheduler = Scheduler(
            BlockPool(blocks), block_size=BLOCK, max_batch_size=slots, token_budget=budget, prefix_caching=prefix
        )
        self.device = FakeExecutor(answer_to)
        self.device._block_size = BLOCK
        self.depth, self.flight, self.sizes = depth, deque(), []

    def dispatch(self):
        while len(self.flight) < self.depth and (plan := self.scheduler.plan()) is not None:
            message = plan.message()
            self.check_step(plan, message)
            self.flight.append((plan, self.device.compute(message)))

    def check_step(self, plan, message):
        scheduler = self.scheduler
        tokens = len(message.decode) + sum(len(row.token_ids) for row in message.prefill)
        assert 0 < tokens <= scheduler.token_budget
        assert len(scheduler.running) == scheduler.slots.taken <= scheduler.slots.size
        assert len(set(message.decode)) == len(message.decode)
        self.sizes.append((len(message.prefill), len(message.decode)))
        writable = [b for seq in scheduler.running for b in seq.blocks[seq.num_cached // BLOCK :]]
        assert len(set(writable)) == len(writable), "two sequences may write one block"

    def collect(self):
        plan, tokens = self.flight.popleft()
        for seq, _ in self.scheduler.complete(plan, tokens):
            if len(seq.tokens) == seq.limit:
                self.scheduler.end(seq)
        self.scheduler.retire(plan)

    def run(self):
        while True:
            self.dispatch()
            if not self.flight:
                break
            self.collect()
        assert self.scheduler.idle
        self.scheduler.check()


prompts = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 12)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(8, 24), st.integers(1, 6), st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_every_sequence_gets_its_own_answer(work, blocks, slots, budget, depth, prefix):
    sim = Simulation(blocks=blocks, slots=slots, budget=budget, depth=depth, prefix=prefix)
    seqs = [sequence(prompt, new, arrival=float(i)) for i, (prompt, new) in enumerate(work)]
    for seq in seqs:
        sim.scheduler.add(seq)
    sim.run()
    for seq, (prompt, new) in zip(seqs, work, strict=True):
        assert seq.status is Status.ENDED
        assert seq.tokens == prompt + answer_to(prompt)[:new]


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(8, 14), st.lists(st.tuples(st.integers(0, 11), st.sampled_from("cedr")), max_size=40))
def test_cancelling_and_failing_at_any_moment_loses_nothing(work, blocks, operations):
    sim = Simulation(blocks=blocks, slots=4, budget=6)
    waiting = deque(sequence(p, n, arrival=float(i), priority=i % 2) for i, (p, n) in enumerate(work))
    prompts_of = {id(seq): (p, n) for seq, (p, n) in zip(waiting, work, strict=True)}
    seqs, cancelled = list(waiting), set()
    for number, name in operations:
        if waiting:
            sim.scheduler.add(waiting.popleft())
        if name == "e" and seqs and seqs[number % len(seqs)] not in waiting:
            victim = seqs[number % len(seqs)]
            sim.scheduler.end(victim)
            cancelled.add(id(victim))
        elif name == "d":
            sim.dispatch()
        elif name == "c" and sim.flight:
            sim.collect()
        elif name == "r":
            sim.flight.clear()
            sim.scheduler.rollback(contents_lost=bool(number % 2))
        sim.scheduler.pool.check()
    for seq in waiting:
        sim.scheduler.add(seq)
    sim.run()
    for seq in seqs:
        prompt, new = prompts_of[id(seq)]
        if id(seq) not in cancelled:
            assert seq.tokens == prompt + answer_to(prompt)[:new]


def test_decode_rows_and_prompt_chunks_share_a_step():
    sim = Simulation(blocks=64, slots=4, budget=8)
    sim.scheduler.add(sequence([1, 2], 30, arrival=0.0))
    for _ in range(3):
        sim.dispatch()
        sim.collect()
    sim.scheduler.add(sequence(list(range(40)), 4, arrival=1.0))
    sim.run()
    chunks = [decode for prefill, decode in sim.sizes if prefill]
    assert len(chunks) >= 6
    assert all(decode == 1 for decode in chunks[2:6]), "the running stream got a token in every step of the long prompt"


def test_scarce_blocks_preempt_the_youngest_and_lose_nothing():
    sim = Simulation(blocks=10, slots=8, budget=64)
    seqs = [sequence([i] * 5, 15, arrival=float(i)) for i in range(8)]
    for seq in seqs:
        sim.scheduler.add(seq)
    sim.run()
    assert sim.scheduler.preemptions >= 1
    assert all(seq.tokens == [i] * 5 + answer_to([i] * 5)[:15] for i, seq in enumerate(seqs))


def test_a_waiting_sequence_of_higher_priority_goes_first():
    sim = Simulation(blocks=64, slots=1, budget=64)
    low, high = sequence([1], 3, priority=5, arrival=0.0), sequence([2], 3, priority=0, arrival=1.0)
    order = []
    sim.scheduler.add(low)
    sim.scheduler.add(high)
    while not sim.scheduler.idle:
        sim.dispatch()
        sim.collect()
        order += [s for s in (low, high) if s.status is Status.ENDED and s not in order]
    assert order == [high, low]


def test_equal_beginnings_are_computed_once():
    sim = Simulation(blocks=64, slots=4, budget=64)
    prompt = list(range(17))
    sim.scheduler.add(sequence(prompt, 2))
    sim.run()
    again = sequence(prompt, 2)
    sim.scheduler.add(again)
    sim.run()
    assert sim.scheduler.cached_tokens == 16
    assert again.tokens == prompt + answer_to(prompt)[:2]


def test_blocks_come_back_only_when_the_last_step_that_writes_them_has_answered():
    sim = Simulation(blocks=8, slots=2, budget=64, prefix=False)
    seq = sequence([1, 2, 3], 8)
    sim.scheduler.add(seq)
    sim.dispatch()
    assert len(sim.flight) == 2
    sim.scheduler.end(seq)
    assert sim.scheduler.pool.counts.used == 1
    sim.collect()
    assert sim.scheduler.pool.counts.used == 1
    sim.collect()
    assert sim.scheduler.pool.counts == (8, 0, 0)
