"""Tiny models with random weights: real checkpoints of many families that load in a blink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 16},
    "gemma2": {"sliding_window": 16, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 16, "head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "cohere": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "head_dim": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {"head_dim": 16},
    "nanochat": {},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "bias": True},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 256, "n_inner": 96},
    "nemotron": {},
    "stablelm": {},
}

_RENAMED_AWAY = {
    "gpt2": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
}

#: families that every version of transformers we work with serves
FAMILIES = tuple(family for family in _FAMILIES if family != "falcon")


def tiny_model(
    folder: Path | str,
    family: str = "llama",
    *,
    seed: int = 0,
    with_tokenizer: bool = False,
    chat_template: bool = True,
    **config_overrides: Any,
) -> Path:
    """Save a random fp32 model of `family` (4 layers, hidden 64, 8 query and 2 key heads, 512 ids, 256 positions).

    With `with_tokenizer` a byte-level BPE tokenizer of at most 512 ids lies beside it.
    """
    import torch
    import transformers

    fields = {k: v for k, v in _COMMON.items() if k not in _RENAMED_AWAY.get(family, ())}
    config = transformers.AutoConfig.for_model(family, **{**fields, **_FAMILIES[family], **config_overrides})
    path = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classes: Any = transformers.AutoModelForCausalLM
        model = classes.from_config(config, dtype=torch.float32)
        _spread(model)
    model.save_pretrained(path)
    if with_tokenizer:
        tiny_tokenizer(path, chat_template=chat_template)
    return path


def _spread(model: Any) -> None:
    """Initial weights are so small that all logits are alike: larger ones, and biases and norms that do something."""
    import torch

    for name, param in model.named_parameters():
        if param.ndim >= 2:
            torch.nn.init.normal_(param, std=0.15)
        else:
            torch.nn.init.normal_(param, mean=1.0 if "norm" in name and "bias" not in name else 0.0, std=0.1)


_CORPUS = (
    "What is the capital of France? The capital of France is Paris.",
    "Hello there! How are you? I am fine, thank you, and you?",
    "The quick brown fox jumps over the lazy dog. One two three four five six seven.",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(folder: Path | str, *, chat_template: bool = True) -> Path:
    """A byte-level BPE tokenizer: `<|endoftext|>` is 0, `<|im_end|>` (the end token) 1, `<|im_start|>` 2."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    wrapper: Any = transformers.PreTrainedTokenizerFast
    wrapped = wrapper(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    if chat_template:
        wrapped.chat_template = CHAT_TEMPLATE
    path = Path(folder)
    wrapped.save_pretrained(path)
    return path
