"""Plans of steps, and how large a cache may be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corogen.attention.cache import _cgroup_room, available_memory
from corogen.attention.plan import Planner, RowSpan

CPU = torch.device("cpu")


def planner(window: int | None, block_size: int = 4) -> Planner:
    return Planner(block_size, [window], torch.float32, CPU)


def visible(blocks: torch.Tensor, mask: torch.Tensor, block_size: int = 4) -> list[int]:
    """Cache places that a row with this mask looks at."""
    places = (blocks[:, None] * block_size + torch.arange(block_size)).ravel()
    return places[: len(mask)][mask == 0].tolist()


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.sampled_from([None, 1, 4, 16, 100]))
@settings(max_examples=60, deadline=None)
def test_a_decode_row_sees_its_own_tokens_and_no_others(starts: list[int], window: int | None) -> None:
    tables = [np.arange(i * 200, i * 200 + 110)[::-1].astype(np.int32) for i in range(len(starts))]
    plan = planner(window).plan([RowSpan(s, 1, t) for s, t in zip(starts, tables, strict=True)], [])
    found: dict[int, list[int]] = {}
    for group in plan.windows[window].decode:
        rows = list(range(group.rows.start, group.rows.stop)) if isinstance(group.rows, slice) else group.rows.tolist()
        for row, blocks, mask in zip(rows, group.blocks.view(group.size, -1), group.mask[:, 0, 0], strict=True):
            found[row] = visible(blocks, mask)
    for row, (start, table) in enumerate(zip(starts, tables, strict=True)):
        first = 0 if window is None else max(0, start + 1 - window)
        assert found[row] == [int(table[p // 4]) * 4 + p % 4 for p in range(first, start + 1)]
        assert int(plan.write[row]) == int(table[start // 4]) * 4 + start % 4


@given(st.integers(0, 60), st.integers(1, 40), st.sampled_from([None, 1, 4, 16]))
@settings(max_examples=60, deadline=None)
def test_a_prefill_token_sees_what_came_before_it(start: int, count: int, window: int | None) -> None:
    table = np.arange(50, 80)[::-1].astype(np.int32)
    plan = planner(window).plan([], [RowSpan(start, count, table)])
    (span,) = plan.windows[window].prefill
    if span.blocks is None:
        assert start == 0
        assert span.num_keys == count
        assert span.mask is not None or window is None or count <= window
        return
    assert span.mask is not None
    for i in range(count):
        first = 0 if window is None else max(0, start + i + 1 - window)
        wanted = [int(table[p // 4]) * 4 + p % 4 for p in range(first, start + i + 1)]
        assert visible(span.blocks, span.mask[i]) == wanted


def test_the_padded_length_of_a_row_is_its_own_affair() -> None:
    table = np.arange(200, dtype=np.int32)
    alone = planner(None).plan([RowSpan(70, 1, table)], []).windows[None].decode
    mixed = planner(None).plan([RowSpan(s, 1, table) for s in (3, 70, 700)], []).windows[None].decode
    assert alone[0].mask.shape[-1] in [g.mask.shape[-1] for g in mixed]
    assert len(mixed) == 3


def test_control_groups_bound_the_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert _cgroup_room(tmp_path, own) == [400]
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, text in (("max", "300"), ("current", "250"), ("stat", "anon 1")):
        (tmp_path / "a" / "b" / f"memory.{name}").write_text(text)
    assert _cgroup_room(tmp_path, own) == [400, 50]
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_room(tmp_path, own) == [50]
    assert available_memory() > 0
