"""Tiny models, saved once a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

from corogen.testing.tiny import tiny_model

ModelMaker = Callable[..., Path]


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """`make_model(family, **config)`: a folder that is shared by the tests and must not be changed."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **config: Any) -> Path:
        key = f"{family}-{sorted(config.items())}"
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp(family), family, **config)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo model, converted."""
    from corogen.model.gguf import convert, converted_folder
    from corogen.model.source import resolve_model

    file = resolve_model("demo")
    folder = converted_folder(file)
    if not folder.is_dir():
        convert(file, folder)
    return folder
