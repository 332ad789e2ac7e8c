"""GGUF files: where the converted model lies, and the conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def converted_folder(gguf: Path) -> Path:
    raise NotImplementedError


def convert(gguf: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    raise NotImplementedError
