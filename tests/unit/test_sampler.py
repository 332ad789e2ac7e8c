"""Choosing tokens: distributions, cuts, seeds, and that a row never depends on its neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corogen.sample.noise import uniform, uniforms
from corogen.sample.penalties import TokenCounts, counts_tokens
from corogen.sample.sampler import SampleRow, sample
from corogen.wire.messages import Sampling
from tests.model.conftest import one_thread  # noqa: F401 (a fixture)

CPU = torch.device("cpu")


def draw_many(logits: torch.Tensor, sampling: Sampling, count: int = 4000) -> torch.Tensor:
    """[vocabulary], how often each id was chosen at `count` positions."""
    rows = [SampleRow(sampling, position) for position in range(count)]
    chosen = sample(logits.expand(count, -1).clone(), rows)
    return torch.bincount(chosen, minlength=logits.shape[-1]) / count


class TestNoise:
    def test_is_uniform_over_positions_and_seeds(self) -> None:
        for numbers in ([uniform(7, p) for p in range(20000)], [uniform(s, 7) for s in range(20000)]):
            values = torch.tensor(numbers, dtype=torch.float64)
            assert 0 <= float(values.min()) < 0.001
            assert 0.999 < float(values.max()) < 1
            assert abs(float(values.mean()) - 0.5) < 0.01
            assert abs(float(values.var()) - 1 / 12) < 0.005
            assert abs(float(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1])) < 0.03

    def test_is_the_same_on_every_machine(self) -> None:
        assert [uniform(1, 2), uniform(2, 1)] == [0.2508221804826011, 0.7590649017095568]

    def test_seed_and_position_are_not_interchangeable(self) -> None:
        assert len({uniform(s, p) for s in range(100) for p in range(100)}) == 10000


class TestDistribution:
    LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_follows_the_softmax(self, temperature: float) -> None:
        wanted = (self.LOGITS[0] / temperature).softmax(-1)
        assert (draw_many(self.LOGITS, Sampling(temperature=temperature, seed=3)) - wanted).abs().max() < 0.03

    def test_top_k_keeps_the_best(self) -> None:
        seen = draw_many(self.LOGITS, Sampling(temperature=1.0, top_k=2))
        assert (seen[:2] - self.LOGITS[0, :2].softmax(-1)).abs().max() < 0.03
        assert float(seen[2:].sum()) == 0

    def test_top_p_keeps_the_smallest_set_that_holds_it(self) -> None:
        shares = self.LOGITS[0].softmax(-1).cumsum(-1)
        for kept in range(1, 6):
            just_enough = float(shares[kept - 1]) - 1e-4
            seen = draw_many(self.LOGITS, Sampling(temperature=1.0, top_p=just_enough), 2000)
            assert float(seen[kept:].sum()) == 0

    def test_top_p_counts_what_top_k_left(self) -> None:
        two = self.LOGITS[0, :2].softmax(-1)
        seen = draw_many(self.LOGITS, Sampling(temperature=1.0, top_k=2, top_p=float(two[0]) - 1e-4))
        assert float(seen[0]) == 1

    def test_min_p_is_a_share_of_the_best(self) -> None:
        chances = self.LOGITS[0].softmax(-1)
        cut = float(chances[2] / chances[0]) * 0.99
        seen = draw_many(self.LOGITS, Sampling(temperature=1.0, min_p=cut))
        assert float(seen[3:].sum()) == 0
        assert float(seen[2]) > 0

    def test_a_large_vocabulary_is_cut_like_a_small_one(self) -> None:
        """The first guess at the nucleus is taken when it suffices, and not when it does not."""
        generator = torch.Generator().manual_seed(0)
        for spread in (0.1, 6.0):
            logits = torch.randn(1, 5000, generator=generator) * spread
            chances = logits[0].softmax(-1)
            order = chances.argsort(descending=True)
            kept = int((chances[order].double().cumsum(-1) < 0.8).sum()) + 1
            seen = draw_many(logits, Sampling(temperature=1.0, top_p=0.8), 3000)
            assert set(seen.nonzero()[:, 0].tolist()) <= set(order[:kept].tolist())

    def test_tiny_temperatures_are_greedy(self) -> None:
        for temperature in (1e-4, 1e-10, 1e-38):
            seen = draw_many(self.LOGITS * 100, Sampling(temperature=temperature), 50)
            assert float(seen[0]) == 1

    def test_half_precision_logits(self) -> None:
        seen = draw_many(self.LOGITS.half() * 1000, Sampling(temperature=1e-6, top_p=1e-4), 20)
        assert float(seen[0]) == 1


class TestEdits:
    def test_banned_ids_are_never_chosen(self) -> None:
        logits = torch.tensor([[5.0, 4.0, 3.0]])
        assert sample(logits, [SampleRow(Sampling(banned_ids=(0,)), 1)]).tolist() == [1]
        assert sample(logits, [SampleRow(Sampling(temperature=9.0, banned_ids=(0, 1), seed=4), 1)]).tolist() == [2]

    def test_suppressed_ids_until_their_position(self) -> None:
        logits = torch.tensor([[5.0, 4.0]]).expand(2, -1)
        settings_ = Sampling(suppress_ids=(0,), suppress_until=7)
        assert sample(logits, [SampleRow(settings_, 6), SampleRow(settings_, 7)]).tolist() == [1, 0]

    def test_the_callers_logits_stay_as_they_are(self) -> None:
        logits = torch.tensor([[5.0, 4.0]])
        sample(logits, [SampleRow(Sampling(banned_ids=(0,)), 1)])
        assert logits.tolist() == [[5.0, 4.0]]


class TestPenalties:
    def test_only_settings_that_count_need_counts(self) -> None:
        assert not counts_tokens(Sampling(temperature=1.0, top_k=3))
        assert counts_tokens(Sampling(repetition_penalty=1.1))
        assert counts_tokens(Sampling(presence_penalty=-0.5))
        assert counts_tokens(Sampling(frequency_penalty=0.1))

    def test_repetition_looks_at_the_prompt_too_and_the_others_do_not(self) -> None:
        counts = TokenCounts(prompt_len=3, vocab_size=6, device=CPU)
        counts.add([0, 1, 1, 2, 2], 0)
        counts.add_sampled(torch.tensor([3]))
        start = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])
        repeated, counted = start.clone(), start.clone()
        counts.apply(repeated, Sampling(repetition_penalty=2.0))
        assert repeated.tolist() == [1.0, -4.0, 1.0, -4.0, 2.0, -2.0]
        counts.apply(counted, Sampling(presence_penalty=1.0, frequency_penalty=0.25))
        assert counted.tolist() == [2.0, -2.0, 0.5, -3.25, 2.0, -2.0]

    @given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 12), st.data())
    @settings(max_examples=60, deadline=None)
    def test_chunks_count_like_one_piece(self, ids: list[int], prompt_len: int, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, len(ids)))
        whole, pieces = (TokenCounts(prompt_len, 10, CPU) for _ in range(2))
        whole.add(ids, 0)
        pieces.add(ids[:cut], 0)
        pieces.add(ids[cut:], cut)
        results = [torch.zeros(10) for _ in range(2)]
        for counts, row in zip((whole, pieces), results, strict=True):
            row.add_(3.0)
            counts.apply(row, Sampling(repetition_penalty=1.5, frequency_penalty=0.5))
        assert torch.equal(*results)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-4]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**63 - 1),
    banned_ids=st.sampled_from([(), (3,), (1, 2)]),
)


@given(st.lists(SAMPLINGS, min_size=1, max_size=6), st.integers(0, 2**31), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_rows_do_not_depend_on_their_neighbours(samplings: list[Sampling], seed: int, random) -> None:
    logits = torch.randn(len(samplings), 700, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [SampleRow(s, 10 + i) for i, s in enumerate(samplings)]
    together = sample(logits, rows).tolist()
    order = list(range(len(rows)))
    random.shuffle(order)
    assert sample(logits[order], [rows[i] for i in order]).tolist() == [together[i] for i in order]
    assert [sample(logits[i : i + 1], [rows[i]]).item() for i in range(len(rows))] == together


@given(SAMPLINGS, st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_a_chosen_id_is_one_that_the_settings_allow(sampling: Sampling, seed: int) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 3
    (token,) = sample(logits, [SampleRow(sampling, 5)]).tolist()
    assert token not in sampling.banned_ids
    left = logits[0].clone()
    left[list(sampling.banned_ids)] = -math.inf
    if sampling.temperature == 0:
        assert token == int(left.argmax())
    elif sampling.top_k:
        assert float(left[token]) >= float(left.topk(sampling.top_k).values[-1])


def test_many_numbers_at_once_are_the_same_numbers() -> None:
    seeds, positions = [0, 1, 2**63 + 5, 2**64 - 1, 77], [0, 9, 4000, 2**31, 1]
    assert uniforms(seeds, positions).tolist() == [uniform(s, p) for s, p in zip(seeds, positions, strict=True)]
