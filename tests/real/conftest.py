"""The demo model's real weights, converted once per run of the suite."""

import pytest

from corogen.model.gguf import converted_folder
from corogen.model.source import resolve_model


@pytest.fixture(scope="session")
def demo_gguf():
    """Path of the demo model's GGUF file."""
    return resolve_model("demo")


@pytest.fixture(scope="session")
def demo_folder(demo_gguf):
    """The demo model as a folder that transformers reads."""
    from corogen.model.gguf import convert

    folder = converted_folder(demo_gguf)
    if not folder.exists():
        convert(demo_gguf, folder, lambda done, total: None)
    return folder


@pytest.fixture(scope="session")
def reference(demo_folder):
    """transformers' own model, fp32, eager."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()
