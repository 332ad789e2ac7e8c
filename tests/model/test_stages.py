"""Pipeline stages one behind the other against the whole model."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from corogen.attention.base import forward_context
from corogen.attention.probe import Probe
from corogen.errors import CheckpointError, ConfigError, UnsupportedModel
from corogen.model import hf
from corogen.model import load as loading
from corogen.model.load import Loader
from corogen.model.shard import Shard
from corogen.model.stages import find_split, keep_stage, try_tokens
from corogen.testing.tiny import FAMILIES
from tests.model.conftest import ModelMaker
from tests.model.driver import Driver, load
from tests.model.reference import random_prompts, reference, reference_logits
from tests.model.staged import CPU, Chain

#: its layers return tuples. Older versions of transformers write its attention without the interface
FALCON = pytest.param(
    "falcon",
    marks=pytest.mark.skipif(
        not hasattr(importlib.import_module("transformers.models.falcon.modeling_falcon"), "ALL_ATTENTION_FUNCTIONS"),
        reason="this transformers does not serve it",
    ),
)
PROMPTS = random_prompts(5, 40, 90)


def all_logits(runner: Any, chunk: int = 33, new_tokens: int = 4) -> list[torch.Tensor]:
    """[new tokens, vocabulary] for each prompt, in steps where prefill rows, cached prefixes and decode rows meet."""
    return [torch.stack(s.logits) for s in Driver(runner, chunk).generate(PROMPTS, new_tokens)]


def difference_from_transformers(path: Path, runner: Any) -> float:
    """The largest of any logit of the new tokens."""
    model, worst = reference(path), 0.0
    for s in Driver(runner, chunk=33).generate(PROMPTS, 4):
        wanted = reference_logits(model, s.tokens)[s.prompt_len - 1 : -1]
        worst = max(worst, float((torch.stack(s.logits) - wanted).abs().max()))
    return worst


def assert_as_whole(path: Path, chain: Chain, **spec: Any) -> None:
    """The stages compute what the whole computes, to the last bit."""
    for found, wanted in zip(all_logits(chain), all_logits(load(path, **spec)[0]), strict=True):
        assert torch.equal(found, wanted)


# --- what stages compute ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("family", [*FAMILIES, FALCON])
def test_stages_give_the_logits_of_transformers(family: str, pp: int, make_model: ModelMaker) -> None:
    path = make_model(family)
    chain = Chain(path, pp)
    assert difference_from_transformers(path, chain) < 2e-4
    assert sum(len(s.layers) for s in chain.stages) == 4
    assert [s.warnings for s in chain.stages] == [[]] * pp
    assert {s.vocab_size for s in chain.stages} == {512}


@pytest.mark.parametrize("partition", [(1, 3), (3, 1), (1, 2, 1), (1, 1, 1, 1)])
def test_explicit_partitions_are_obeyed(partition: tuple[int, ...], make_model: ModelMaker) -> None:
    path = make_model("gemma3_text")
    chain = Chain(path, len(partition), partition)
    assert tuple(len(s.layers) for s in chain.stages) == partition
    assert_as_whole(path, chain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gpt_oss", FALCON])
def test_no_bit_differs_from_the_whole(family: str, dtype: str, make_model: ModelMaker) -> None:
    path = make_model(family)
    assert_as_whole(path, Chain(path, 3, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("family", ["opt", "qwen3_moe"])
def test_random_weights_are_those_of_the_whole(family: str, make_model: ModelMaker) -> None:
    path = make_model(family)
    assert_as_whole(path, Chain(path, 3, random_weights=True), random_weights=True)


def test_opt_with_narrow_embeddings(make_model: ModelMaker) -> None:
    """Its smallest embeddings are projected to the layers' width in front of them, and back behind them."""
    path = make_model("opt", word_embed_proj_dim=32)
    chain = Chain(path, 2)
    assert_as_whole(path, chain)
    assert "model.decoder.project_in.weight" not in dict(chain.stages[1].model.named_parameters())


# --- what stages read and hold ---------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """{tensor: bytes} of all that is read from safetensors files, summed up over stages."""
    seen: dict[str, int] = {}
    original = loading._reader

    def reader(opened: Any, name: str) -> Callable[[], torch.Tensor]:
        def count() -> torch.Tensor:
            tensor = original(opened, name)()
            seen[name] = seen.get(name, 0) + tensor.nbytes
            return tensor

        return count

    monkeypatch.setattr(loading, "_reader", reader)
    return seen


def file_sizes(path: Path) -> dict[str, int]:
    return {name: t.nbytes for name, t in load_file(path / "model.safetensors").items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3_moe", "gemma2"])
def test_every_tensor_is_read_by_one_stage(family: str, make_model: ModelMaker, read: dict[str, int]) -> None:
    path = make_model(family)
    for i in range(3):
        keep_and_load(path, Shard(pp_rank=i, pp=3))
    tied = {
        "gpt2": "transformer.wte.weight",
        "opt": "model.decoder.embed_tokens.weight",
        "gemma2": "model.embed_tokens.weight",
    }
    wanted = {name: size * (2 if name == tied.get(family) else 1) for name, size in file_sizes(path).items()}
    assert read == wanted


def keep_and_load(path: Path, shard: Shard, dtype: torch.dtype = torch.float32) -> tuple[Any, Loader]:
    with hf.quiet():
        model = hf.build_model(hf.load_config(path, {}), dtype)
    keep_stage(model, shard)
    loader = Loader(model, CPU, dtype)
    loader.load(path)
    return model, loader


def test_stages_hold_what_they_read_and_no_more(make_model: ModelMaker, read: dict[str, int]) -> None:
    path = make_model("llama")
    held = 0
    for i in range(2):
        model, _ = keep_and_load(path, Shard(pp_rank=i, pp=2))
        assert not any(p.is_meta for p in model.parameters())
        held += sum(p.nbytes for p in model.parameters())
    assert held == sum(read.values()) == sum(file_sizes(path).values())


def test_a_middle_stage_holds_its_layers_alone(make_model: ModelMaker) -> None:
    model, _ = keep_and_load(make_model("gemma3_text"), Shard(pp_rank=1, pp=3, partition=(1, 2, 1)))
    assert {name.split(".")[2] for name, _ in model.named_parameters()} == {"1", "2"}


@pytest.fixture
def changed(tmp_path: Path, make_model: ModelMaker) -> Callable[..., Path]:
    """A copy of a model, its tensors changed."""

    def change(family: str, edit: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
        shutil.copytree(make_model(family, **config), tmp_path, dirs_exist_ok=True)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors = edit(tensors) or tensors
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return change


def test_a_tied_embedding_may_be_stored_under_the_heads_name(changed: Callable[..., Path]) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    path = changed("llama", edit, tie_word_embeddings=True)
    assert_as_whole(path, Chain(path, 2))


def test_a_tied_head_that_is_stored_and_differs_is_used_as_it_is(changed: Callable[..., Path]) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * -0.5

    path = changed("llama", edit, tie_word_embeddings=True)
    assert_as_whole(path, Chain(path, 2))


def test_names_without_the_models_prefix_find_their_stage(changed: Callable[..., Path], read: dict[str, int]) -> None:
    path = changed("llama", lambda tensors: {k.removeprefix("model."): t for k, t in tensors.items()})
    chain = Chain(path, 2)
    assert read == file_sizes(path)
    assert [s.warnings for s in chain.stages] == [[], []]
    assert_as_whole(path, chain)


def test_a_pickled_checkpoint(changed: Callable[..., Path]) -> None:
    path = changed("llama", lambda tensors: None)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert_as_whole(path, Chain(path, 2))


def test_a_missing_tensor_is_its_own_stages_fault(changed: Callable[..., Path]) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    path = changed("llama", lambda tensors: {k: t for k, t in tensors.items() if k != name})
    keep_and_load(path, Shard(pp=2))
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor\(s\): {name}"):
        keep_and_load(path, Shard(pp_rank=1, pp=2))


def test_tensors_without_a_place_are_still_named(changed: Callable[..., Path]) -> None:
    path = changed("llama", lambda tensors: tensors | {"model.layers.3.mlp.odd": torch.zeros(1)})
    assert [len(keep_and_load(path, Shard(pp_rank=i, pp=2))[1].warnings) for i in range(2)] == [0, 1]


# --- what can not be cut ---------------------------------------------------------------------------------------------


def test_more_stages_than_layers_are_refused(make_model: ModelMaker) -> None:
    with pytest.raises(ConfigError, match="pp=5 is more than the 4 layers"):
        keep_and_load(make_model("llama"), Shard(pp=5))


def test_a_family_whose_layers_share_a_cache_is_refused(make_model: ModelMaker) -> None:
    config = hf.load_config(make_model("llama"), {})
    config.num_kv_shared_layers = 2
    with pytest.raises(UnsupportedModel, match=r"llama can not be cut.*keys and values of earlier layers.*use pp=1"):
        find_split(config, torch.float32)


@pytest.fixture
def layer_class() -> Iterator[Any]:
    """Llama's layers, whose forward a test may replace."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward
    yield LlamaDecoderLayer
    LlamaDecoderLayer.forward = original


def test_a_family_that_looks_back_past_the_stage_is_refused(layer_class: Any, make_model: ModelMaker) -> None:
    original = layer_class.forward

    def forward(self: Any, hidden_states: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> torch.Tensor:
        if not hasattr(position_ids, "first"):
            position_ids.first = hidden_states
        out: torch.Tensor = original(self, hidden_states, position_ids=position_ids, **kwargs)
        return out + position_ids.first

    layer_class.forward = forward
    config = hf.load_config(make_model("llama"), {})
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UnsupportedModel, match=r"llama can not be cut.*other logits.*use pp=1"):
            find_split(config, dtype)


def test_a_family_that_runs_a_layer_twice_is_refused(layer_class: Any, make_model: ModelMaker) -> None:
    original = layer_class.__call__

    def call(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return original(self, original(self, hidden_states, **kwargs), **kwargs)

    layer_class.__call__ = call
    try:
        with pytest.raises(UnsupportedModel, match=r"llama can not be cut.*use pp=1"):
            find_split(hf.load_config(make_model("llama"), {}), torch.float32)
    finally:
        layer_class.__call__ = original


def test_another_dtype_between_the_layers_is_refused(make_model: ModelMaker) -> None:
    model, _ = keep_and_load(make_model("llama"), Shard(pp=2, partition=(1, 3)), torch.bfloat16)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output.float())
    with (
        forward_context(Probe()),
        torch.inference_mode(),
        pytest.raises(UnsupportedModel, match=r"torch.float32 between its layers.*use pp=1"),
    ):
        try_tokens(model, 1, CPU)


def test_trying_a_family_takes_little(make_model: ModelMaker, tmp_path: Path) -> None:
    """A large model's config becomes a small model."""
    config = json.loads((make_model("llama") / "config.json").read_text())
    config |= {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 80, "num_key_value_heads": 8}))
    from corogen.model.shrink import shrunken

    large = hf.load_config(tmp_path, {})
    with hf.quiet():
        model = hf.build_model(shrunken(large), torch.float32)
    assert sum(p.numel() for p in model.parameters()) < 10e6
    assert large.num_hidden_layers == 80
    assert len(find_split(large, torch.bfloat16).before) == 1


# --- the demo model --------------------------------------------------------------------------------------------------


@pytest.mark.real_model
def test_the_demo_model_in_three_stages(demo: Path) -> None:
    chain = Chain(demo, 3)
    prompts = random_prompts(7, 60, vocab=49152)
    parts = Driver(chain, chunk=25).generate(prompts, 5)
    whole = Driver(load(demo)[0], chunk=25).generate(prompts, 5)
    assert [s.new for s in parts] == [s.new for s in whole]
    for a, b in zip(
        itertools.chain(*(s.logits for s in parts)), itertools.chain(*(s.logits for s in whole)), strict=True
    ):
        assert torch.equal(a, b)
