"""Public failures with GGUF files: weights, tokenizers, damage. Each test cites its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from corogen.errors import CheckpointError, ModelError, TokenizerError, UnsupportedModel
from corogen.model.gguf import convert, converted_folder
from corogen.model.gguf_config import llama3_factors
from corogen.model.hf import load_config
from tests.model.conftest import ModelMaker, make_model, one_thread  # noqa: F401 (fixtures)
from tests.model.driver import Driver, load
from tests.model.gguf_writer import write_gguf
from tests.model.reference import random_prompts, reference, reference_logits


class TestDamagedFiles:
    """huggingface/transformers#27923."""

    def test_a_gguf_file_with_another_magic(self, tmp_path: Path) -> None:
        file = tmp_path / "bad.gguf"
        file.write_bytes(b"GGML" + bytes(200))
        with pytest.raises(CheckpointError, match=r"bad\.gguf is not a GGUF file"):
            convert(file, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]

    @pytest.mark.parametrize("share", [0.0, 0.0001, 0.05, 0.5, 0.99])
    def test_a_truncated_gguf_file(self, share: float, tmp_path: Path, make_model: ModelMaker) -> None:  # noqa: F811
        file = tmp_path / "whole.gguf"
        write_gguf(make_model("llama"), file, gguf.GGMLQuantizationType.F32)
        whole = file.read_bytes()
        file.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(CheckpointError, match=r"whole\.gguf"):
            convert(file, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["whole.gguf"]


class TestGGUFWeights:
    """huggingface/transformers#31766."""

    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
    def test_float32_files_give_the_original_model(
        self,
        family: str,
        tmp_path: Path,
        make_model: ModelMaker,  # noqa: F811
    ) -> None:
        extra = {"attention_bias": True} if family == "llama" else {}
        path = make_model(family, **extra)
        write_gguf(path, tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)
        convert(tmp_path / "m.gguf", tmp_path / "out")
        model, runner = reference(path), load(tmp_path / "out")[0]
        for s in Driver(runner).generate(random_prompts(9, 40), 4):
            wanted = reference_logits(model, s.tokens)[s.prompt_len - 1 : -1]
            assert float((torch.stack(s.logits) - wanted).abs().max()) < 2e-4

    @pytest.mark.parametrize(
        ("kind", "bound"), [(gguf.GGMLQuantizationType.F16, 1e-3), (gguf.GGMLQuantizationType.Q8_0, 1e-2)]
    )
    def test_smaller_types_stay_within_their_rounding(
        self,
        kind: gguf.GGMLQuantizationType,
        bound: float,
        tmp_path: Path,
        make_model: ModelMaker,  # noqa: F811
    ) -> None:
        path = make_model("llama")
        write_gguf(path, tmp_path / "m.gguf", kind)
        convert(tmp_path / "m.gguf", tmp_path / "out")
        original, converted = (load_file(p / "model.safetensors") for p in (path, tmp_path / "out"))
        assert original.keys() == converted.keys()
        for name, tensor in original.items():
            assert float((converted[name] - tensor).abs().max()) <= bound * max(1.0, float(tensor.abs().max()))

    def test_rope_factors_of_llama_3_are_understood(self, tmp_path: Path, make_model: ModelMaker) -> None:  # noqa: F811

        scaling = {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        folder = make_model("llama", rope_parameters={**scaling, "rope_theta": 10000.0})
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](load_config(folder, {}), torch.device("cpu"))
        plain = 10000.0 ** -(np.arange(0, 8, 2) / 8)
        assert np.allclose(plain / scaled.numpy(), llama3_factors(8, 10000.0, 32.0, 8192), rtol=1e-4)

    def test_two_processes_may_convert_at_once(self, tmp_path: Path, make_model: ModelMaker) -> None:  # noqa: F811
        write_gguf(make_model("llama"), tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)

        def other_is_first(done: int, total: int) -> None:
            if done == 3:
                convert(tmp_path / "m.gguf", tmp_path / "all" / "out")

        convert(tmp_path / "m.gguf", tmp_path / "all" / "out", other_is_first)
        assert [p.name for p in (tmp_path / "all").iterdir()] == ["out"]
        assert load(tmp_path / "all" / "out")[1].vocab_size == 512

    def test_a_folder_that_can_not_be_written_is_named(self, tmp_path: Path, make_model: ModelMaker) -> None:  # noqa: F811
        write_gguf(make_model("llama"), tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)
        with pytest.raises(ModelError, match="COROGEN_CACHE"):
            convert(tmp_path / "m.gguf", tmp_path / "m.gguf" / "below a file")

    def test_an_unknown_architecture_is_named(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv6")
        writer.add_block_count(2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedModel, match="rwkv6"):
            convert(tmp_path / "m.gguf", tmp_path / "out")

    def test_a_worker_converts_once(
        self,
        tmp_path: Path,
        make_model: ModelMaker,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("COROGEN_CACHE", str(tmp_path / "cache"))
        file = tmp_path / "m.gguf"
        write_gguf(make_model("llama"), file, gguf.GGMLQuantizationType.F32)
        assert "convert" in load(file)[1].phases
        assert converted_folder(file).is_dir()
        assert "convert" not in load(file)[1].phases
        assert [p.name for p in (tmp_path / "cache" / "converted").iterdir()] == [converted_folder(file).name]


class TestGGUFTokenizer:
    """huggingface/transformers#31630."""

    TEXT = "<|begin_of_text|>Hello 123  wörld 👍<|eot_id|>"

    @pytest.fixture
    def parts(self) -> dict[str, Any]:
        """A byte-level vocabulary with a few merges and two control tokens, as llama.cpp's converter lists them."""
        from tokenizers.pre_tokenizers import ByteLevel

        merges = ["H e", "l l", "He ll", "Hell o", "1 2", "12 3", "Ġ w"]
        tokens = [*sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
        tokens += ["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"]
        return {"tokens": tokens, "kinds": [1] * (len(tokens) - 3) + [3] * 3, "merges": merges}

    def converted(self, tmp_path: Path, folder: Path, **tokens: Any) -> Path:
        write_gguf(folder, tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32, **tokens)
        convert(tmp_path / "m.gguf", tmp_path / "out")
        return tmp_path / "out"

    def test_special_tokens_and_bytes_round_trip(
        self,
        tmp_path: Path,
        make_model: ModelMaker,  # noqa: F811
        parts: dict[str, Any],
    ) -> None:
        start, end = len(parts["tokens"]) - 3, len(parts["tokens"]) - 2
        folder = self.converted(
            tmp_path, make_model("llama"), **parts, pre="llama-bpe", bos_token_id=start, eos_token_id=end
        )
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        encoded = tokenizer.encode(self.TEXT, add_special_tokens=False)
        assert encoded.tokens[0] == "<|begin_of_text|>"
        assert encoded.tokens[1:4] == ["Hello", "Ġ", "123"]
        assert encoded.tokens[-1] == "<|eot_id|>"
        assert (encoded.ids[0], encoded.ids[-1]) == (start, end)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == self.TEXT
        assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "Hello 123  wörld 👍"
        assert tokenizer.encode("1234").tokens[1:] == ["123", "4"]

    @pytest.mark.parametrize(("metadata", "adds"), [({}, True), ({"add_bos_token": False}, False)])
    def test_begin_token_by_the_metadata(
        self,
        metadata: dict[str, Any],
        adds: bool,
        tmp_path: Path,
        make_model: ModelMaker,  # noqa: F811
        parts: dict[str, Any],
    ) -> None:
        start = len(parts["tokens"]) - 3
        folder = self.converted(tmp_path, make_model("llama"), **parts, pre="llama-bpe", bos_token_id=start, **metadata)
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Hello").ids
        assert (ids[0] == start) is adds
        assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is adds

    def test_template_and_every_end_token_are_kept(
        self,
        tmp_path: Path,
        make_model: ModelMaker,  # noqa: F811
        parts: dict[str, Any],
    ) -> None:
        turn, text = len(parts["tokens"]) - 2, len(parts["tokens"]) - 1
        metadata = {"eos_token_id": text, "eot_token_id": turn, "chat_template": "{{ messages[0].content }}"}
        folder = self.converted(tmp_path, make_model("llama"), **parts, **metadata)
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings["eos_token_id"] == [text, turn]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        assert config["chat_template"] == "{{ messages[0].content }}"
        assert config["eos_token"] == "<|end_of_text|>"

    def test_an_unknown_word_splitting_is_refused(
        self,
        tmp_path: Path,
        make_model: ModelMaker,  # noqa: F811
        parts: dict[str, Any],
    ) -> None:

        with pytest.raises(TokenizerError, match="'martian'"):
            self.converted(tmp_path, make_model("llama"), **parts, pre="martian")

    def test_sentence_pieces_with_bytes_for_the_rest(
        self,
        tmp_path: Path,
        make_model: ModelMaker,  # noqa: F811
    ) -> None:
        pieces = ["▁Hello", "Hello", "Hell", "ello", "He", "ll", "lo", "▁", *"Helo", "w"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
        kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
        scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
        folder = self.converted(
            tmp_path,
            make_model("llama"),
            tokens=tokens,
            kinds=kinds,
            merges=[],
            model="llama",
            token_scores=scores,
            bos_token_id=1,
            eos_token_id=2,
            unk_token_id=0,
        )
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        encoded = tokenizer.encode("Hello  wé</s>")
        assert encoded.tokens == ["<s>", "▁Hello", "▁", "▁", "w", "<0xC3>", "<0xA9>", "</s>"]
        assert tokenizer.decode(encoded.ids) == "Hello  wé"
