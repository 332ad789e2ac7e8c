"""GGUF files: converted once into an ordinary model folder, which everything else then reads.

Reading and dequantising is the `gguf` package's work; what the metadata means stands in `gguf_config` and
`gguf_tokenizer`. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from corogen.errors import CheckpointError, ModelError, ModelNotFound
from corogen.model.gguf_config import Metadata, model_config
from corogen.model.gguf_tokenizer import generation_config, tokenizer_files
from corogen.paths import cache_root

if TYPE_CHECKING:
    from gguf import GGUFReader

Progress = Callable[[int, int], None]

#: part of a converted folder's name; raise it when the conversion changes
_VERSION = 1
_SAMPLE = 1 << 20
_MAGIC = b"GGUF"


def converted_folder(gguf: Path) -> Path:
    """Where the converted model of this file lies or will lie; its name holds the file's content in short.

    Raises:
        ModelNotFound: there is no such file.
    """
    return cache_root() / "converted" / f"{gguf.stem}-{_identity(gguf)}"


def _identity(file: Path) -> str:
    """A hash of the size and of 18 samples: a file of many gigabytes must not be read at every start."""
    try:
        size = file.stat().st_size
        digest = hashlib.blake2b(f"{_VERSION}:{size}".encode(), digest_size=10)
        with file.open("rb") as stream:
            for offset in sorted({0, max(0, size - _SAMPLE), *(size * i // 17 for i in range(1, 17))}):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE))
    except OSError as error:
        raise ModelNotFound(f"{file} can not be read: {error}") from error
    return digest.hexdigest()


def convert(gguf: Path, folder: Path, progress: Progress = lambda done, total: None) -> None:
    """Write `folder` from the file: config.json, model.safetensors (float32), tokenizer and generation settings.

    The folder appears at once, complete or not at all; two processes may convert the same file at the same time.

    Raises:
        ModelError: a CheckpointError, an UnsupportedModel, a TokenizerError, or that the folder can not be written
    """
    reader = _open(gguf)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-", dir=folder.parent) as scratch:
            model = Path(scratch) / "model"
            model.mkdir()
            _write_model(gguf, reader, model, progress)
            _publish(model, folder)
    except OSError as error:
        raise ModelError(f"{gguf.name} can not be converted to {folder}: {error}; COROGEN_CACHE moves it") from error


#: beginning of the names of half-converted folders; the id of the process that writes one follows
_SCRATCH = ".converting-"


def _sweep(parent: Path) -> None:
    """Remove what processes left that were killed while they converted."""
    for folder in parent.glob(f"{_SCRATCH}*"):
        owner = folder.name.removeprefix(_SCRATCH).split("-")[0]
        try:
            os.kill(int(owner), 0)
        except (ValueError, ProcessLookupError):
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # alive, and another user's
            continue


def _publish(model: Path, folder: Path) -> None:
    """Move `model` to `folder`, unless another process was first: its folder is as good as ours."""
    try:
        os.rename(model, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _open(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        with file.open("rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise ModelNotFound(f"{file} can not be read: {error}") from error
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull`")
    if not head.startswith(_MAGIC):
        raise CheckpointError(f"{file} is not a GGUF file: it begins with {head[:4]!r}")
    try:
        return GGUFReader(file)
    except Exception as error:  # the reader raises whatever numpy does when a file ends early
        raise CheckpointError(f"{file} is incomplete or damaged: {error!r}") from error


class _Tensor(NamedTuple):
    """One parameter to write, and how to get its values when it is its turn."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def _write_model(file: Path, reader: GGUFReader, scratch: Path, progress: Progress) -> None:
    metadata = Metadata({name: field.contents() for name, field in reader.fields.items()})
    with _named(file):
        factors = _rope_factors(reader)
        config = model_config(metadata, {t.name for t in reader.tensors}, factors)
        files = tokenizer_files(metadata)
    files["generation_config.json"] = generation_config(metadata)
    files["config.json"] = config
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False)
        (scratch / name).write_text(text, encoding="utf-8")
    _write_safetensors(scratch / "model.safetensors", _tensors(file, reader, config, scratch), progress)


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Metadata that lacks a key is a fault of the file."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{file} lacks the metadata key {error}") from error


def _rope_factors(reader: GGUFReader) -> list[float] | None:
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            return [float(x) for x in tensor.data.ravel()]
    return None


def _tensors(file: Path, reader: GGUFReader, config: dict[str, Any], folder: Path) -> list[_Tensor]:
    """Every tensor of the file that the class has a parameter for, under the parameter's name."""
    from corogen.model.gguf_names import parameter_names

    names = parameter_names(config, folder, config["num_hidden_layers"])
    size, found = file.stat().st_size, []
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise CheckpointError(f"{file} is incomplete: it ends before {tensor.name} does")
        if tensor.name in names:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            found.append(_Tensor(names[tensor.name], shape, _read(tensor, config)))
        elif tensor.name != "rope_freqs.weight":
            raise CheckpointError(f"{file} holds {tensor.name}, which {config['model_type']} has no place for")
    return found


def _read(tensor: Any, config: dict[str, Any]) -> Callable[[], np.ndarray]:
    from gguf import dequantize

    def read() -> np.ndarray:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return restored(values, tensor.name, config)

    return read


def restored(values: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """Undo what llama.cpp's converter does to some tensors.

    Llama's rotary layout pairs neighbours there and halves here, so rows of q and k are permuted; Gemma's norms are
    stored with their 1 added.
    """
    kind = config["model_type"]
    if kind == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return values - 1
    return values


def _write_safetensors(path: Path, tensors: Sequence[_Tensor], progress: Progress) -> None:
    """The format is a header and the values behind it, so one tensor at a time is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        begin, end = end, end + 4 * int(np.prod(t.shape))
        header[t.name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for done, t in enumerate(tensors):
            progress(done, len(tensors))
            stream.write(np.ascontiguousarray(t.read(), dtype="<f4").data)
    progress(len(tensors), len(tensors))
