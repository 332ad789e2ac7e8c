"""Public failures of loading: weights, ties, rope, GGUF. Each test cites its source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from corogen.errors import CheckpointError, ConfigError, ModelError, UnsupportedModel
from corogen.testing.tiny import tiny_model
from tests.model.conftest import ModelMaker, make_model, one_thread  # noqa: F401 (fixtures)
from tests.model.driver import Driver, Sequence_, load
from tests.model.reference import random_prompts, reference, reference_logits

CopyModel = Callable[..., Path]


@pytest.fixture
def copy_model(make_model: ModelMaker, tmp_path: Path) -> CopyModel:  # noqa: F811
    """A model folder of one's own, to be damaged."""

    def copy(family: str = "llama", **config: Any) -> Path:
        return Path(shutil.copytree(make_model(family, **config), tmp_path / "model", dirs_exist_ok=True))

    return copy


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def difference(path: Path, lengths: tuple[int, ...] = (12,), chunk: int = 256, new: int = 4, **spec: Any) -> float:
    """The largest difference of any new token's logits from transformers."""
    runner, _ = load(path, **spec)
    model, worst = reference(path), 0.0
    for s in Driver(runner, chunk).generate(random_prompts(*lengths), new):
        wanted = reference_logits(model, s.tokens)[s.prompt_len - 1 : -1]
        worst = max(worst, float((torch.stack(s.logits) - wanted).abs().max()))
    return worst


class TestTiedEmbeddings:
    """vllm-project/vllm#5621 and vllm-project/vllm PR #6758."""

    def test_no_head_is_stored(self, make_model: ModelMaker) -> None:  # noqa: F811
        path = make_model("llama", tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(path / "model.safetensors")
        assert difference(path) < 1e-4
        assert load(path)[1].warnings == []

    def test_an_equal_head_is_stored_too(self, copy_model: CopyModel) -> None:
        path = copy_model("llama", tie_word_embeddings=True)
        edit_weights(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        assert difference(path) < 1e-4
        assert load(path)[1].warnings == []

    def test_a_different_head_is_used_as_transformers_does_with_a_warning(self, copy_model: CopyModel) -> None:
        path = copy_model("llama", tie_word_embeddings=True)
        edit_weights(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0)}))
        assert difference(path) < 1e-4
        (warning,) = load(path)[1].warnings
        assert "lm_head.weight" in warning

    def test_only_the_head_is_stored(self, copy_model: CopyModel) -> None:
        path = copy_model("llama", tie_word_embeddings=True)
        edit_weights(path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
        assert difference(path) < 1e-4

    def test_an_untied_head_that_is_missing_is_named(self, copy_model: CopyModel) -> None:
        path = copy_model("llama", tie_word_embeddings=False)
        edit_weights(path, lambda t: t.pop("lm_head.weight"))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            load(path)


class TestIncompleteCheckpoints:
    """sgl-project/sglang PR #32279."""

    @pytest.fixture
    def sharded(self, copy_model: CopyModel) -> Path:
        path = copy_model("llama")
        tensors = load_file(path / "model.safetensors")
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
        for file, part in halves.items():
            save_file({n: tensors[n] for n in part}, path / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {n: file for file, part in halves.items() for n in part}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        (path / "model.safetensors").unlink()
        return path

    def test_two_shards_load(self, sharded: Path) -> None:
        assert difference(sharded) < 1e-4

    def test_a_missing_shard_is_named(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match="model-00002-of-00002"):
            load(sharded)

    def test_an_index_can_not_point_elsewhere(self, sharded: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
        with pytest.raises(CheckpointError, match="not a file of its folder"):
            load(sharded)

    def test_a_missing_tensor_is_named(self, copy_model: CopyModel) -> None:
        path = copy_model()
        edit_weights(path, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
        with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight"):
            load(path)

    def test_an_unknown_tensor_is_one_warning(self, copy_model: CopyModel) -> None:
        path = copy_model()
        edit_weights(path, lambda t: t.update({"model.surprise": torch.ones(3), "other": torch.ones(1)}))
        (warning,) = load(path)[1].warnings
        assert "model.surprise" in warning
        assert "other" in warning

    def test_a_misshaped_tensor_is_named_with_both_shapes(self, copy_model: CopyModel) -> None:
        path = copy_model()
        edit_weights(path, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the shape \[63\].*\[64\]"):
            load(path)

    def test_a_torch_checkpoint_loads(self, copy_model: CopyModel) -> None:
        path = copy_model()
        wanted = reference(path)
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
        (s,) = Driver(load(path)[0]).generate(random_prompts(12), 2)
        assert float((torch.stack(s.logits) - reference_logits(wanted, s.tokens)[11:-1]).abs().max()) < 1e-4


class TestDamagedFiles:
    """huggingface/transformers#27923."""

    def test_a_git_lfs_pointer(self, copy_model: CopyModel) -> None:
        path = copy_model()
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
        (path / "model.safetensors").write_bytes(pointer)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is a git-lfs pointer"):
            load(path)

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
    def test_a_truncated_file(self, share: float, copy_model: CopyModel) -> None:
        path = copy_model()
        whole = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is (incomplete|empty)"):
            load(path)

    def test_something_else(self, copy_model: CopyModel) -> None:
        path = copy_model()
        (path / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            load(path)

    def test_no_weights_at_all(self, copy_model: CopyModel) -> None:
        path = copy_model()
        (path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="holds no weights"):
            load(path)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": 3}'])
    def test_a_damaged_config(self, content: str, copy_model: CopyModel) -> None:
        path = copy_model()
        (path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            load(path)


class TestRope:
    """vllm-project/vllm#9481."""

    VARIANTS: ClassVar[dict[str, Any]] = {
        "llama3": (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            256,
        ),
        "linear": ({"type": "linear", "factor": 2.0}, 512),
        "both keys": ({"type": "linear", "rope_type": "linear", "factor": 2.0}, 512),
        "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        "null": (None, 256),
        "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 256),
    }

    @pytest.mark.parametrize("name", VARIANTS)
    def test_known_types_equal_transformers_beyond_the_original_length(self, name: str, copy_model: CopyModel) -> None:
        setting, limit = self.VARIANTS[name]
        path = copy_model()
        config = json.loads((path / "config.json").read_text())
        theta = config.pop("rope_parameters")["rope_theta"]
        (path / "config.json").write_text(json.dumps({**config, "rope_theta": theta, "rope_scaling": setting}))
        assert load(path)[1].max_positions == limit
        assert difference(path, lengths=(150,), chunk=64, new=3) < 2e-4

    def test_long_rope_ends_where_its_frequencies_would_switch(self, make_model: ModelMaker) -> None:  # noqa: F811
        """The switch depends on the longest sequence of a batch, so beyond it rows would change their neighbours."""
        factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
        path = make_model("phi3", original_max_position_embeddings=64, rope_scaling={"type": "longrope", **factors})
        _, ready = load(path)
        assert ready.max_positions == 64
        (line,) = ready.warnings
        assert "longrope" in line
        assert difference(path, lengths=(50,), new=10) < 2e-4

    def test_an_unknown_type_is_named(self, copy_model: CopyModel) -> None:
        path = copy_model()
        edit_config(path, rope_scaling={"rope_type": "foo", "factor": 2.0})
        with pytest.raises(UnsupportedModel, match="'foo'"):
            load(path)

    def test_overrides_reach_the_config(self, make_model: ModelMaker) -> None:  # noqa: F811
        scaling = {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}
        assert load(make_model("llama"), hf_overrides=scaling)[1].max_positions == 1024


class TestSlidingWindow:
    """vllm-project/vllm#3385."""

    @pytest.mark.parametrize("chunk", [256, 7])
    def test_every_position_around_the_window(self, chunk: int, make_model: ModelMaker) -> None:  # noqa: F811
        assert difference(make_model("mistral"), lengths=(15, 16, 17, 18, 40), chunk=chunk, new=20) < 1e-4


class TestVocabulary:
    """vllm-project/vllm#340: a model with more ids than its tokenizer."""

    def test_the_runner_reports_the_models_ids_and_can_be_told_which_to_avoid(
        self,
        make_model: ModelMaker,  # noqa: F811
    ) -> None:
        from corogen.wire.messages import Sampling

        runner, ready = load(make_model("llama", vocab_size=520))
        assert ready.vocab_size == 520
        beyond = Sampling(banned_ids=tuple(range(512, 520)), temperature=50.0, seed=1)
        (s,) = Driver(runner).generate(random_prompts(4), 60, [beyond])
        assert max(s.new) < 512


class TestDtype:
    """substratusai/vllm-docker#37."""

    def test_auto_is_float32_on_a_cpu_with_one_line(self, tmp_path: Path) -> None:
        path = tiny_model(tmp_path / "m")
        edit_weights(path, lambda t: t.update({k: v.to(torch.bfloat16) for k, v in t.items()}))
        edit_config(path, dtype="bfloat16")
        _, ready = load(path)
        assert ready.dtype == "float32"
        (line,) = ready.warnings
        assert "bfloat16" in line
        assert "float32" in line

    def test_explicit_and_unsupported_is_an_error_with_advice(self, make_model: ModelMaker) -> None:  # noqa: F811
        with pytest.raises(ConfigError, match="use 'float32'"):
            load(make_model("llama"), dtype="float16")


class TestArchitectures:
    """What can not be right is refused by name."""

    @pytest.mark.parametrize("kind", ["no_such_model", "bloom", "mamba", "t5"])
    def test_models_without_our_attention(self, kind: str, copy_model: CopyModel) -> None:
        path = copy_model()
        (path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 512}))
        with pytest.raises(UnsupportedModel, match=kind):
            load(path)

    def test_layer_types_that_are_not_attention(self, copy_model: CopyModel) -> None:
        path = copy_model("qwen3")
        edit_config(path, layer_types=["full_attention", "chunked_attention"] * 2)
        with pytest.raises(UnsupportedModel, match="chunked_attention"):
            load(path)

    def test_quantised_checkpoints(self, copy_model: CopyModel) -> None:
        path = copy_model()
        edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4})
        with pytest.raises(UnsupportedModel, match="quantization_config"):
            load(path)


def test_prompts_that_hold_the_end_token_are_not_cut(make_model: ModelMaker) -> None:  # noqa: F811
    """huggingface/transformers#25790: no padding token is needed, and none is confused with the end token."""
    runner, _ = load(make_model("llama"))
    prompts = [[5, 1, 7], random_prompts(17)[0], [*random_prompts(39)[0], 1]]
    together = Driver(runner).generate(prompts, 6)
    for prompt, other in zip(prompts, together, strict=True):
        alone = Sequence_(0, prompt)
        Driver(runner).finish([alone], 6)
        assert alone.new == other.new
