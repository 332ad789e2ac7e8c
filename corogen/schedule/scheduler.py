"""Which tokens the next step computes, and what a step's result means for the sequences in it."""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import attrgetter

from corogen.schedule.blocks import BlockPool
from corogen.schedule.prefix import PrefixHasher
from corogen.schedule.quarantine import Quarantine
from corogen.schedule.sequence import Sequence, Status
from corogen.schedule.slots import SlotPool
from corogen.wire.messages import PrefillRow, SlotBlocks, SlotInit, StepInput

_rank = attrgetter("rank")

#: a step computes at least this many tokens, however short memory is
LOWEST_BUDGET = 16


@dataclass(slots=True)
class Plan:
    """One step: the message for the workers, and the sequences that its rows belong to."""

    step: int
    epoch: int
    init: list[SlotInit] = field(default_factory=list)
    blocks: list[SlotBlocks] = field(default_factory=list)
    prefill: list[PrefillRow] = field(default_factory=list)
    decode_rows: list[Sequence] = field(default_factory=list)
    prefill_rows: list[Sequence] = field(default_factory=list)
    #: those that got their slot with this step
    started: list[Sequence] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """Of its rows."""
        return [*self.decode_rows, *self.prefill_rows]

    def message(self) -> StepInput:
        """The step as the workers get it."""
        slots = [seq.slot for seq in self.decode_rows]
        return StepInput(self.step, self.epoch, self.init, self.blocks, slots, self.prefill)


class Scheduler:
    """Continuous batching over a fixed pool of blocks and slots.

    There is no prefill phase and no decode phase: each sequence has computed positions that catch up with its tokens.
    A step has a budget of tokens; decode rows come first, then the chunks of prompts. Steps are planned before the
    results of earlier ones are in: a sampled token counts as `pending` until then.

    A block is returned to the pool only when the last step that may write it has answered. When blocks run out the
    sequence of the highest rank (the least urgent, then the youngest) goes back to waiting and is computed again later.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_batch_size: int, token_budget: int, prefix_caching: bool = True
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        #: decode rows always fit: a budget below the number of slots would let running sequences starve
        self.token_budget = max(token_budget, max_batch_size)
        self.slots = SlotPool(max_batch_size)
        self.running: list[Sequence] = []  # ordered by rank
        self.preemptions = 0
        self.cached_tokens = 0
        self.epoch = 0
        self.quarantine = Quarantine()
        self._hasher = PrefixHasher(block_size) if prefix_caching else None
        self._waiting: list[tuple[float, int, Sequence]] = []
        self._num_waiting = 0
        self._tie = itertools.count()
        self._steps = itertools.count()
        self._in_flight: deque[Plan] = deque()
        self._retiring: deque[tuple[int, list[int]]] = deque()

    # ------------------------------------------------------------------ what the engine asks

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return self._num_waiting

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not (self.running or self._num_waiting or self._in_flight)

    def add(self, seq: Sequence) -> None:
        """A new sequence waits for its turn."""
        self._enqueue(seq)

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can be computed before a result arrives."""
        plan = Plan(next(self._steps), self.epoch)
        if self.quarantine.alone is not None:
            self._clear_the_field(self.quarantine.alone)
        budget = self.token_budget - self._plan_decode(plan)
        budget = self._plan_running_prefill(plan, budget)
        self._admit(plan, budget)
        if not (plan.decode_rows or plan.prefill_rows):
            return None
        self._in_flight.append(plan)
        return plan

    def complete(self, plan: Plan, tokens: SequenceOf[int]) -> list[tuple[Sequence, int]]:
        """The step's result is in. Returns the tokens of sequences that have not ended, in the order of the rows.

        The caller looks at each token and calls `end` where it was the last; blocks whose last step this was are free
        after `retire`.
        """
        self._in_flight.popleft()
        arrived: list[tuple[Sequence, int]] = []
        running = Status.RUNNING
        for seq, token in zip(plan.decode_rows, tokens, strict=False):
            seq.rows_in_flight -= 1
            if seq.status is running:
                seq.pending -= 1
                seq.tokens.append(token)
                seq.num_done += 1
                if seq.num_done % self.block_size == 0:
                    self._register(seq)
                arrived.append((seq, token))
            elif seq.status is Status.WAITING:
                self._late_token(seq, token, arrived)
        sampled = iter(tokens[len(plan.decode_rows) :])
        for seq, row in zip(plan.prefill_rows, plan.prefill, strict=True):
            self._complete_prefill(seq, row, sampled, arrived)
        if self.quarantine.alone is not None:
            for seq, _ in arrived:
                self.quarantine.progressed(seq)
        return arrived

    def retire(self, plan: Plan) -> None:
        """Return the blocks that no step after `plan` may write."""
        while self._retiring and self._retiring[0][0] <= plan.step:
            self.pool.release(self._retiring.popleft()[1])

    def end(self, seq: Sequence) -> None:
        """The sequence has ended, for whatever reason. Ending twice is allowed and does nothing."""
        if seq.status is Status.RUNNING:
            self._leave(seq)
        elif seq.status is Status.WAITING:
            self._num_waiting -= 1
            self._drop_stale_entries()
        seq.status = Status.ENDED

    def rollback(self, *, contents_lost: bool) -> None:
        """The steps in flight will never count: every sequence goes back to its known tokens, in a new epoch."""
        self.epoch += 1
        self._in_flight.clear()
        for seq in list(self.running):
            self._leave(seq)
            seq.pending = seq.rows_in_flight = 0
            self._enqueue(seq)
        for _, _, seq in self._waiting:
            seq.pending = seq.rows_in_flight = 0
        while self._retiring:
            self.pool.release(self._retiring.popleft()[1])
        if contents_lost:
            self.pool.forget_contents()

    def lower_budget(self) -> bool:
        """Compute less at once, after the device ran out of memory. False if that is no longer possible."""
        if self.token_budget <= LOWEST_BUDGET:
            return False
        self.token_budget = max(LOWEST_BUDGET, self.token_budget // 2)
        return True

    def check(self) -> None:
        """Raise RuntimeError if blocks or slots are not where they must be while nothing runs."""
        self.pool.check()
        if self.idle and (self.pool.counts.used or self.slots.taken or self._retiring):
            raise RuntimeError(f"idle with {self.pool.counts} and {self.slots.taken} slots taken")

    # ------------------------------------------------------------------ planning

    def _plan_decode(self, plan: Plan) -> int:
        """One row for each running sequence that has its last token in the workers. Returns the number of rows."""
        size = self.block_size
        rows = plan.decode_rows
        for seq in self.running[:]:
            if not seq.decoding or len(seq.tokens) + seq.pending >= seq.limit:
                continue
            if len(rows) == self.token_budget:
                break
            if seq.num_computed == len(seq.blocks) * size and not self._extend(seq, plan):
                continue
            seq.num_computed += 1
            seq.pending += 1
            seq.rows_in_flight += 1
            seq.last_step = plan.step
            rows.append(seq)
        return len(rows)

    def _extend(self, seq: Sequence, plan: Plan) -> bool:
        """Give a running sequence one more block, at the cost of one behind it if need be."""
        if seq.status is not Status.RUNNING:
            return False  # preempted for another sequence of this very plan
        while not self.pool.available:
            if self._retiring:
                return False  # blocks come back with a result that is under way
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        block = self.pool.allocate(1)
        seq.blocks += block
        plan.blocks.append(SlotBlocks(seq.slot, block))
        return True

    def _clear_the_field(self, alone: Sequence) -> None:
        """Everybody else waits while one sequence is watched."""
        for seq in self.running[:]:
            if seq is not alone:
                self._preempt(seq)

    def _plan_running_prefill(self, plan: Plan, budget: int) -> int:
        for seq in self.running:
            if budget <= 0:
                break
            if not seq.decoding:
                budget -= self._add_chunk(plan, seq, budget)
        return budget

    def _add_chunk(self, plan: Plan, seq: Sequence, budget: int) -> int:
        """The next tokens of a prompt; its last chunk samples. All blocks of a prompt are there from admission on."""
        start = seq.num_computed
        stop = min(len(seq.tokens), start + budget)
        sample = stop == len(seq.tokens)
        plan.prefill.append(PrefillRow(seq.slot, start, seq.tokens[start:stop], sample))
        plan.prefill_rows.append(seq)
        seq.num_computed = stop
        seq.rows_in_flight += 1
        seq.last_step = plan.step
        if sample:
            seq.decoding = True
            seq.pending += 1
        return stop - start

    def _admit(self, plan: Plan, budget: int) -> None:
        """Waiting sequences in order of rank; one that does not fit holds back those behind it, so none starves."""
        while budget > 0 and self.slots:
            seq = self._first_waiting()
            if seq is None or seq.rows_in_flight or not self._take_blocks(seq):
                return
            self._dequeue(seq)
            self._start(seq, plan)
            budget -= self._add_chunk(plan, seq, budget)

    def _first_waiting(self) -> Sequence | None:
        alone = self.quarantine.alone
        if alone is not None:
            return alone if alone.status is Status.WAITING else None
        while self._waiting and self._waiting[0][2].status is not Status.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def _dequeue(self, seq: Sequence) -> None:
        self._num_waiting -= 1
        if self._waiting[0][2] is seq:
            heapq.heappop(self._waiting)
        else:  # out of its turn, to run alone
            self._waiting = [entry for entry in self._waiting if entry[2] is not seq]
            heapq.heapify(self._waiting)

    def _drop_stale_entries(self) -> None:
        """Ended sequences stay in the heap until they come up; with many of them, build it anew."""
        if len(self._waiting) > 2 * self._num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if entry[2].status is Status.WAITING]
            heapq.heapify(self._waiting)

    def _take_blocks(self, seq: Sequence) -> bool:
        """Blocks for all known tokens, cached ones where the beginning is known. False if there are too few."""
        hits = self._cached_blocks(seq)
        needed = -(-len(seq.tokens) // self.block_size) - len(hits)
        if needed + sum(map(self.pool.is_idle, hits)) > self.pool.available:
            return False
        for block in hits:
            self.pool.share(block)
        seq.blocks = hits + self.pool.allocate(needed)
        seq.num_cached = seq.num_computed = seq.num_done = len(hits) * self.block_size
        seq.registered = len(hits)
        return True

    def _cached_blocks(self, seq: Sequence) -> list[int]:
        if self._hasher is None:
            return []
        # the last token is always computed: its logits are needed
        keys = self._hasher.extend(seq.keys, seq.tokens, (len(seq.tokens) - 1) // self.block_size)
        found: list[int] = []
        for key in keys[: (len(seq.tokens) - 1) // self.block_size]:
            block = self.pool.lookup(key)
            if block is None:
                break
            found.append(block)
        return found

    def _start(self, seq: Sequence, plan: Plan) -> None:
        seq.slot = self.slots.acquire()
        seq.status = Status.RUNNING
        self.cached_tokens += seq.num_cached
        plan.started.append(seq)
        insort(self.running, seq, key=_rank)
        cached = tuple(seq.tokens[: seq.num_cached]) if _counts_tokens(seq) else ()
        plan.init.append(SlotInit(seq.slot, seq.prompt_len, seq.num_cached, seq.sampling, cached))
        plan.blocks.append(SlotBlocks(seq.slot, list(seq.blocks)))

    # ------------------------------------------------------------------ results and leaving

    def _complete_prefill(
        self, seq: Sequence, row: PrefillRow, sampled: Iterator[int], arrived: list[tuple[Sequence, int]]
    ) -> None:
        seq.rows_in_flight -= 1
        token = next(sampled) if row.sample else None
        if seq.status is Status.RUNNING:
            seq.num_done = row.start + len(row.token_ids)
            self._register(seq)
            if token is not None:
                seq.pending -= 1
                seq.tokens.append(token)
                arrived.append((seq, token))
        elif seq.status is Status.WAITING and token is not None:
            self._late_token(seq, token, arrived)

    def _late_token(self, seq: Sequence, token: int, arrived: list[tuple[Sequence, int]]) -> None:
        """Preempted is not terminal: what was sampled before still counts."""
        seq.pending -= 1
        seq.tokens.append(token)
        arrived.append((seq, token))

    def _register(self, seq: Sequence) -> None:
        """Make the full blocks that are written for certain findable."""
        if self._hasher is None:
            return
        full = seq.num_done // self.block_size
        keys = self._hasher.extend(seq.keys, seq.tokens, full)
        for i in range(seq.registered, full):
            self.pool.register(seq.blocks[i], keys[i])
        seq.registered = max(seq.registered, full)

    def _preempt(self, seq: Sequence) -> None:
        self.preemptions += 1
        self._leave(seq)
        self._enqueue(seq)

    def _leave(self, seq: Sequence) -> None:
        """Take a running sequence out; its blocks follow when its last step has answered."""
        self.running.remove(seq)
        self.slots.release(seq.slot)
        if seq.rows_in_flight:
            insort(self._retiring, (seq.last_step, seq.blocks), key=lambda entry: entry[0])
        else:
            self.pool.release(seq.blocks)
        seq.forget_progress()

    def _enqueue(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self._num_waiting += 1
        heapq.heappush(self._waiting, (seq.rank, next(self._tie), seq))


def _counts_tokens(seq: Sequence) -> bool:
    s = seq.sampling
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
