"""Chooses tokens. Every row is chosen on its own: neither batch mates nor their order change a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from corogen.model.devices import kernels_work
from corogen.sample.noise import uniform, uniforms
from corogen.sample.penalties import TokenCounts
from corogen.wire.messages import Sampling

#: how many of the best are looked at first when a nucleus is cut on a CPU, where sorting a vocabulary is slow
_NUCLEUS_GUESS = 512


class SampleRow(NamedTuple):
    """One row to choose for: its settings, the absolute position of the new token, and its counts if it has any."""

    sampling: Sampling
    position: int
    counts: TokenCounts | None = None

    @property
    def edits(self) -> bool:
        """Whether logits change before the choice."""
        s = self.sampling
        return bool(self.counts is not None or s.banned_ids or (s.suppress_ids and self.position < s.suppress_until))


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Ids [rows] for logits [rows, vocabulary]; greedy rows are one argmax. Never waits for a GPU."""
    edited = [i for i, row in enumerate(rows) if row.edits]
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if edited:
        logits = logits.clone()
        for i in edited:
            _edit(logits[i], rows[i])
    chosen = logits.argmax(-1)
    if random and kernels_work(logits.device) and logits.stride(-1) == 1:
        _draw_on_device(logits, chosen, random, rows)
    elif random:
        index = _to(torch.tensor(random), logits.device)
        chosen[index] = _draw(logits[index].float(), [rows[i] for i in random])
    return chosen


def _draw_on_device(logits: torch.Tensor, chosen: torch.Tensor, random: list[int], rows: Sequence[SampleRow]) -> None:
    from corogen.sample.triton_sampler import draw

    wanted = [rows[i].sampling for i in random]
    noise = uniforms([s.seed for s in wanted], [rows[i].position for i in random])
    columns = [(i, s.temperature, s.top_k, s.top_p, s.min_p) for i, s in zip(random, wanted, strict=True)]
    settings = np.concatenate([np.array(columns, np.float64), noise[:, None]], 1)
    draw(logits, _to(torch.from_numpy(settings), logits.device), chosen)


def _to(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _edit(logits: torch.Tensor, row: SampleRow) -> None:
    sampling = row.sampling
    if row.counts is not None:
        row.counts.apply(logits, sampling)
    hidden = set(sampling.banned_ids)
    if row.position < sampling.suppress_until:
        hidden.update(sampling.suppress_ids)
    if hidden:
        index = torch.tensor(sorted(i for i in hidden if i < logits.shape[0]), dtype=torch.long)
        logits.index_fill_(0, _to(index, logits.device), float("-inf"))


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """One id a row by inverting the distribution, in the order of ids, at the row's own random number."""
    column = [(r.sampling.temperature, r.sampling.top_p, r.sampling.min_p) for r in rows]
    temperature, top_p, min_p = _to(torch.tensor(column), logits.device).unbind(1)
    # the best first to zero: a tiny temperature then makes the others minus infinity, and the row greedy
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    logits.nan_to_num_(nan=0.0, posinf=0.0, neginf=float("-inf"))
    _cut_top_k(logits, [r.sampling.top_k for r in rows])
    if any(r.sampling.top_p < 1 for r in rows):
        _cut_top_p(logits, top_p, [r.sampling.top_p < 1 for r in rows])
    if any(r.sampling.min_p > 0 for r in rows):
        logits.masked_fill_(logits < min_p.log()[:, None], float("-inf"))
    noise = [uniform(r.sampling.seed, r.position) for r in rows]
    return _invert(logits, _to(torch.tensor(noise, dtype=torch.float64), logits.device))


def _invert(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    mass = logits.double().exp().cumsum(-1)
    target = noise[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def _cut_top_k(logits: torch.Tensor, ks: list[int]) -> None:
    """Hide what is below the k-th best of each row, in place; ties with it stay. k = 0 hides nothing."""
    rows = [i for i, k in enumerate(ks) if 0 < k < logits.shape[1]]
    if not rows:
        return
    index = _to(torch.tensor(rows), logits.device)
    best = logits[index].topk(max(ks[i] for i in rows), dim=-1).values
    place = _to(torch.tensor([ks[i] - 1 for i in rows]), logits.device)
    limit = best.gather(1, place[:, None])
    logits[index] = logits[index].masked_fill(logits[index] < limit, float("-inf"))


def _cut_top_p(logits: torch.Tensor, top_p: torch.Tensor, wanted: list[bool]) -> None:
    """Hide all but the smallest set of best tokens that holds `top_p` of the mass, in place."""
    index = _to(torch.tensor([i for i, w in enumerate(wanted) if w]), logits.device)
    chosen, share = logits[index], top_p[index]
    best = _enough(chosen, share)
    total = chosen.double().exp().sum(-1, keepdim=True)
    before = best.double().exp().cumsum(-1) - best.double().exp()
    inside = before < share.double()[:, None] * total
    limit = torch.where(inside, best, float("inf")).amin(-1, keepdim=True)
    logits[index] = chosen.masked_fill(chosen < limit, float("-inf"))


def _enough(logits: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The best logits of each row, sorted, at least as many as hold `share` of the mass."""
    if logits.device.type == "cpu" and logits.shape[1] > _NUCLEUS_GUESS:
        best = logits.topk(_NUCLEUS_GUESS, dim=-1).values
        held = best.double().exp().sum(-1) / logits.double().exp().sum(-1)
        if bool((held > share.double() + 1e-9).all()):
            return best
    return logits.sort(dim=-1, descending=True).values
