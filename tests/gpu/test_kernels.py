"""Attention kernels against plain torch, over block tables in no order."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from corogen.attention.base import Options, causal_mask, dense_attention

pytestmark = pytest.mark.gpu


class Layer(NamedTuple):
    """One layer's shape and wishes."""

    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 64
    page: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    turned: bool = True


LAYERS = {
    "plain": Layer(),
    "head of 80": Layer(dim=80, value_dim=80),
    "head of 96": Layer(dim=96, value_dim=96),
    "head of 128, one group": Layer(heads=4, kv_heads=4, dim=128, value_dim=128),
    "head of 256": Layer(dim=256, value_dim=256, kv_heads=4),
    "small head": Layer(dim=8, value_dim=8),
    "values of another size": Layer(dim=96, value_dim=64, turned=False),
    "seven heads a group": Layer(heads=14, kv_heads=2),
    "many heads a group": Layer(heads=32, kv_heads=1, dim=128, value_dim=128),
    "window": Layer(window=100),
    "window, odd pages": Layer(window=17, page=7),
    "soft cap": Layer(softcap=30.0, window=300),
    "sinks": Layer(sinks=True),
    "everything": Layer(14, 2, 128, 128, 32, 90, 20.0, True),
}

#: keys that decode rows see, and (start, tokens) of the prompts' chunks
LENGTHS, CHUNKS = [1, 5, 64, 700, 3000], [(0, 1), (0, 200), (333, 70), (1500, 33)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_decode_and_prefill_rows_see_what_they_must(layer: Layer, dtype: torch.dtype) -> None:
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(0)
        found, wanted = both(layer, dtype)
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert float(error) < TOLERANCE[dtype]


def both(layer: Layer, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, heads, value_dim] from the kernels, and in float32 from plain torch."""
    from corogen.attention.triton_decode import decode_attention
    from corogen.attention.triton_prefill import prefill_attention
    from corogen.attention.triton_store import store

    heads, kv, dim, dim_v, page = layer[:5]
    slots, width = len(LENGTHS) + len(CHUNKS), -(-3100 // page)
    blocks = torch.randperm(slots * width, device="cuda").int()
    tables = blocks.view(slots, width)
    keys = torch.randn(slots * width, page, kv, dim, device="cuda").to(dtype)
    values = torch.randn(slots * width, page, kv, dim_v, device="cuda").to(dtype)
    tokens = [(i, n - 1) for i, n in enumerate(LENGTHS)]
    tokens += [(len(LENGTHS) + i, p) for i, (start, n) in enumerate(CHUNKS) for p in range(start, start + n)]
    q, k, v, cos, sin = operands(layer, len(tokens), dtype)
    q0, k0 = (turn(t.clone(), cos, sin) if layer.turned else t.clone() for t in (q, k))
    slot, position = torch.tensor(tokens, device="cuda").T
    places = (tables[slot, position // page] * page + position % page).int()
    sinks = torch.randn(heads, device="cuda").to(dtype) if layer.sinks else None
    options = Options(1.2 * dim**-0.5, layer.window, layer.softcap, sinks)
    out = torch.full((len(tokens), heads, dim_v), float("nan"), dtype=dtype, device="cuda")
    store(q, k, v, keys, values, places, (cos, sin) if layer.turned else None)
    rows, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (range(len(LENGTHS)), LENGTHS))
    arrived = torch.zeros(len(rows) * kv, dtype=torch.int32, device="cuda")
    for _ in range(3):  # the counter of shares must be as it was
        decode_attention(q, keys, values, out, shares_of(rows, lengths, kv), tables, arrived, options)
    assert not arrived.any()
    tile_tokens, tile_list = tiles(heads // kv)
    prefill_attention(q, keys, values, out, tile_list, tile_tokens, tables, options)
    flat = keys.view(-1, kv, dim), values.view(-1, kv, dim_v)
    assert torch.equal(flat[0][places.long()], k0[0].transpose(0, 1))
    return out, torch.cat(list(expected(layer, q0, flat, tables, options)))


def shares_of(rows: torch.Tensor, lengths: torch.Tensor, kv_heads: int) -> torch.Tensor:
    from corogen.attention.triton_decode import max_shares, share_out

    shares = torch.full((max_shares(len(rows), kv_heads), 8), -7, dtype=torch.int32, device=rows.device)
    share_out(rows, lengths, shares, kv_heads)
    return shares


def operands(layer: Layer, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v [1, heads, T, dim] as views of one product, and angles [1, T, dim]."""
    parts = [layer.heads * layer.dim, layer.kv_heads * layer.dim, layer.kv_heads * layer.value_dim]
    fused = torch.randn(1, count, sum(parts), device="cuda").to(dtype).split(parts, -1)
    dims = (layer.dim, layer.dim, layer.value_dim)
    views = [t.view(1, count, -1, d).transpose(1, 2) for t, d in zip(fused, dims, strict=True)]
    return [*views, *torch.randn(2, 1, count, layer.dim, device="cuda").to(dtype)]


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding as model classes write it."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def tiles(group: int) -> tuple[int, torch.Tensor]:
    from corogen.attention.triton_prefill import tokens_per_tile

    size, first, found = tokens_per_tile(group), len(LENGTHS), []
    for i, (start, count) in enumerate(CHUNKS):
        found += [(len(LENGTHS) + i, first + a, min(size, count - a), start + a) for a in range(0, count, size)]
        first += count
    return size, torch.tensor([*found, (-1, 0, 0, 0)], dtype=torch.int32, device="cuda")


def expected(layer: Layer, q, flat, tables, options: Options):
    """One span after the other in float32."""
    spans = [(n - 1, 1) for n in LENGTHS] + CHUNKS
    first = 0
    for slot, (start, count) in enumerate(spans):
        at = torch.arange(start + count, device="cuda")
        places = tables[slot, at // layer.page].long() * layer.page + at % layer.page
        k, v = (t[places].float().transpose(0, 1)[None] for t in flat)
        mask = causal_mask(count, start, start + count, 0, layer.window, torch.float32, q.device)[None, None]
        wide = options._replace(sinks=None if options.sinks is None else options.sinks.float())
        yield dense_attention(q[:, :, first : first + count].float(), k, v, wide, mask=mask)[0].transpose(0, 1)
        first += count


def test_one_long_row_is_shared_out() -> None:
    """Among short rows, and alone."""
    from corogen.attention.triton_decode import decode_attention

    for batch in (1, 40, 300):
        lengths = torch.full((batch,), 50, dtype=torch.int32, device="cuda")
        lengths[-1] = 20_000
        keys, values = torch.randn(2, 1300, 16, 2, 64, device="cuda").bfloat16()
        tables = torch.randperm(1300, device="cuda").int()[None].expand(batch, -1).contiguous()
        q = torch.randn(1, 8, batch, 64, device="cuda").bfloat16()
        out = torch.empty(batch, 8, 64, dtype=torch.bfloat16, device="cuda")
        rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        arrived = torch.zeros(batch * 2, dtype=torch.int32, device="cuda")
        decode_attention(q, keys, values, out, shares_of(rows, lengths, 2), tables, arrived, Options(0.125))
        for row in (0, batch - 1):
            seen = int(lengths[row])
            k, v = (t[tables[row].long()].view(-1, 2, 64)[:seen].float().transpose(0, 1)[None] for t in (keys, values))
            wanted = dense_attention(q[:, :, row : row + 1].float(), k, v, Options(0.125))[0, :, 0]
            assert float((out[row].float() - wanted).norm() / wanted.norm()) < 2e-2


@pytest.mark.parametrize("lengths", [[0], [1], [40_000], [5, 0, 900, 3000], [50] * 255 + [32_000], [700] * 64])
def test_shares_cover_every_key_once(lengths: list[int]) -> None:
    wanted = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    slots = torch.arange(len(lengths), dtype=torch.int32, device="cuda") + 3
    shares = [s for s in shares_of(slots, wanted, 8).tolist() if s[0] >= 0]
    at = 0
    for row, length in enumerate(lengths):
        count = shares[at][3]
        assert [s[:5] for s in shares[at : at + count]] == [[row, row + 3, i, count, length] for i in range(count)]
        at += count
    assert at == len(shares)
    if lengths == [50] * 255 + [32_000]:
        assert shares[-1][3] >= 8  # the long row does not hold up the others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_kernels_give_what_torch_gives(dtype: torch.dtype) -> None:
    from corogen.model.triton_parts import rms_norm, silu_mul, sum_and_rms_norm

    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    x, y = torch.randn(2, 1, 37, 576, device="cuda").to(dtype)
    weight = torch.randn(576, device="cuda").to(dtype)
    wanted = torch.nn.functional.rms_norm(x + y, (576,), weight, 1e-5)
    total, normed = sum_and_rms_norm(x, y, weight, 1e-5, True)
    assert torch.equal(total, x + y)
    torch.testing.assert_close(normed, wanted, **tolerance)
    torch.testing.assert_close(rms_norm(x + y, weight, 1e-5, True), wanted, **tolerance)
    heads = x[..., :512].view(1, 37, 8, 64)
    torch.testing.assert_close(
        rms_norm(heads, weight[:64], 1e-5, True),
        torch.nn.functional.rms_norm(heads, (64,), weight[:64], 1e-5),
        **tolerance,
    )
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(silu_mul(x), torch.nn.functional.silu(gate) * up, **tolerance)


def test_the_best_id_is_the_first_of_several() -> None:
    from corogen.sample.triton_argmax import choose_best

    logits = torch.randn(5, 20_001, device="cuda").bfloat16()
    logits[1, [77, 9000, 20_000]] = 50
    logits[2] = float("nan")
    last, ids = torch.zeros(8, dtype=torch.int32, device="cuda"), torch.zeros(5, dtype=torch.long, device="cuda")
    choose_best(logits, torch.tensor([3, 0, -1, 7, 5], dtype=torch.int32, device="cuda"), last, ids)
    assert ids[[0, 1, 3, 4]].tolist() == [int(logits[0].argmax()), 77, *logits[3:].argmax(-1).tolist()]
    assert 0 <= int(ids[2]) < 20_001
    assert last.tolist() == [77, 0, 0, int(ids[0]), 0, int(ids[4]), 0, int(ids[3])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [300, 50_000])
def test_ids_are_drawn_as_on_a_cpu(vocab: int, dtype: torch.dtype) -> None:
    from corogen.sample.sampler import SampleRow, sample
    from corogen.wire.messages import Sampling

    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(64, vocab, generator=generator) * 3).to(dtype)
    heats, counts, shares, floors = (0.5, 0.9, 1.5, 1e-6), (0, 0, 40), (1.0, 0.9), (0.0, 0.05)
    settings = [Sampling(heats[i % 4], counts[i % 3], shares[i % 2], floors[i % 5 == 0], seed=i) for i in range(64)]
    rows = [SampleRow(s, i) for i, s in enumerate(settings)]
    rows[7] = SampleRow(Sampling(), 3)
    # in 16 bits a CPU rounds nothing before the draw either; sums in another order may move a draw between neighbours
    same = (sample(logits.cuda(), rows).cpu() == sample(logits.float(), rows)).float().mean()
    assert float(same) > 0.95


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    from corogen.sample.sampler import SampleRow, sample
    from corogen.wire.messages import Sampling

    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, float("-inf")]], device="cuda").expand(4000, -1).contiguous()
    ids = sample(logits, [SampleRow(Sampling(1.0, seed=i), 5) for i in range(4000)])
    found = torch.bincount(ids, minlength=5).cpu() / 4000
    torch.testing.assert_close(found, logits[0].softmax(-1).cpu(), rtol=0, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 48), (3072, 2048), (9000, 600)])
def test_a_product_of_one_row_with_what_stands_around_it(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from corogen.model.triton_parts import Norm, matrix_vector, rms_norm, silu_mul

    size, inner = shape
    weight, bias = torch.randn(shape, device="cuda").to(dtype) / 8, torch.randn(size, device="cuda").to(dtype)
    x, around = torch.randn(1, 1, inner, device="cuda").to(dtype), torch.randn(inner, device="cuda").to(dtype)
    normed = rms_norm(x, around, 1e-5, True)
    tolerance = {"rtol": 3e-2, "atol": 3e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for b in (None, bias):
        both = torch.nn.functional.linear(normed, weight, b)
        found = matrix_vector(x, weight, b, norm=Norm(around, 1e-5, True), gated=True)
        torch.testing.assert_close(found, silu_mul(both), **tolerance)
        residual = torch.randn(1, 1, size, device="cuda").to(dtype)
        found = matrix_vector(normed, weight, b, residual=residual)
        torch.testing.assert_close(found, both + residual, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(100, 48), (3072, 2048), (9000, 600), (16384, 4096)])
def test_one_row_times_a_matrix(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from corogen.model.matvec import MatVecLinear

    layer = MatVecLinear(torch.randn(shape, device="cuda").to(dtype), torch.randn(shape[0], device="cuda").to(dtype))
    x = torch.randn(1, 1, shape[1], device="cuda").to(dtype)
    wanted = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    error = (layer(x).double() - wanted).norm() / wanted.norm()
    assert float(error) < (5e-3 if dtype == torch.bfloat16 else 1e-6)
