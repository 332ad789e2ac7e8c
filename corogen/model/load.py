"""A checkpoint's tensors, straight into the parameters of a model that was built without memory."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from corogen.errors import CheckpointError
from corogen.model import hf
from corogen.model.stages import stage_of

Progress = Callable[[int, int], None]
Reader = Callable[[], torch.Tensor]

#: (index, single file) in the order of preference
_LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
_LFS_HEAD = b"version https://git-lfs"


def find_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, all of them present and none an obvious stand-in.

    Raises:
        CheckpointError: naming the file that is missing, empty, or only a pointer.
    """
    for index_name, single in _LAYOUTS:
        index = folder / index_name
        if index.is_file():
            return _checked([folder / name for name in _shards(index)], f"{index_name} lists it")
        if (folder / single).exists():
            return _checked([folder / single], "")
    raise CheckpointError(f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, nor an index")


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{index} lists {name!r}, which is not a file of its folder")
    return names


def _checked(files: list[Path], why: str) -> list[Path]:
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise CheckpointError(f"{files[0].parent} lacks {', '.join(missing)}" + (f": {why}" if why else ""))
    for file in files:
        with file.open("rb") as stream:
            head = stream.read(len(_LFS_HEAD))
        if not head:
            raise CheckpointError(f"{file} is empty: the download is incomplete")
        if head == _LFS_HEAD:
            raise CheckpointError(f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull`")
    return files


def read_tensors(files: list[Path], stack: ExitStack) -> Iterator[tuple[str, Reader]]:
    """(name, reader) for every tensor of `files`; readers work until `stack` is closed."""
    for file in files:
        yield from _read_safetensors(file, stack) if file.suffix == ".safetensors" else _read_pickle(file)


def _read_safetensors(file: Path, stack: ExitStack) -> Iterator[tuple[str, Reader]]:
    try:
        opened = stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is incomplete or not a safetensors file: {error}") from error
    for name in opened.keys():  # noqa: SIM118 (not a mapping)
        yield name, _reader(opened, name)


def first_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of the first tensor of numbers, for configs that do not tell."""
    with ExitStack() as stack:
        for _, read in read_tensors(find_files(folder)[:1], stack):
            dtype = read().dtype
            if dtype.is_floating_point:
                return dtype
    return None


def _reader(opened: Any, name: str) -> Reader:
    return lambda: opened.get_tensor(name)


def _read_pickle(file: Path) -> Iterator[tuple[str, Reader]]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{file} is incomplete or not a checkpoint of plain tensors: {error}") from error
    for name, tensor in tensors.items():
        yield name, _constant(tensor)


def _constant(tensor: torch.Tensor) -> Reader:
    return lambda: tensor


class Loader:
    """Fills one model from one folder. `warnings` are lines for the user."""

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._keeps_float32 = hf.keeps_float32(model)
        self._waiting = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
        self._buffers = dict(model.named_buffers())
        self._stage = stage_of(model)
        names = set(self._waiting)
        #: {parameter: the one it shares memory with} of the whole model
        self._sources = hf.tied_parameters(model) if self._stage is None else self._stage.tied
        #: the same where this stage holds both
        self._tied = {a: b for a, b in self._sources.items() if a in names and b in names}
        #: {parameter of another stage: the one of this stage that has its values}
        self._twins = {a: b for p in self._sources.items() for a, b in (p, p[::-1]) if b in names and a not in names}
        self._twin_readers: dict[str, tuple[str, Reader]] = {}
        self._unexpected: list[str] = []
        self.warnings: list[str] = []

    def load(self, folder: Path, progress: Progress = lambda done, total: None) -> None:
        """Read every tensor once.

        On a CPU a parameter of the checkpoint's own dtype is a view of the mapped file until it is packed; call
        `own_memory` when packing is over.

        Raises:
            CheckpointError: naming files or tensors that are missing, broken, or of another shape.
        """
        with ExitStack() as stack:
            self._place_all(list(read_tensors(find_files(folder), stack)), progress)
            self._place_twins()
            self._tie()
        self._check_missing(folder)
        if self._unexpected:
            names = _shortened(self._unexpected)
            self.warnings.append(f"the checkpoint holds tensors that the model has no place for: {names}")

    def fill_randomly(self) -> None:
        """The same random numbers each time: matrices of a small spread, ones for norms, zeros for biases.

        They depend on the parameter's name, not on what else the model holds.
        """
        for target, shape in list(self._waiting.items()):
            if target not in self._tied:
                value = self._random(self._sources.get(target, target), shape)
                _set_parameter(self._model, target, value)
                del self._waiting[target]
        self._tie()

    def _random(self, name: str, shape: torch.Size) -> torch.Tensor:
        dtype = torch.float32 if self._keeps_float32(name) else self._dtype
        value = torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=self._device)
        if len(shape) > 1:
            value.normal_(std=0.02, generator=torch.Generator(self._device).manual_seed(zlib.crc32(name.encode())))
        return value

    def _place_all(self, tensors: list[tuple[str, Reader]], progress: Progress) -> None:
        mapper = hf.KeyMapper(self._model, self._model.state_dict() if self._stage is None else self._stage.names)
        for done, (name, read) in enumerate(tensors):
            progress(done, len(tensors))
            target, pattern = mapper.map(name)
            if target in self._twins:
                self._twin_readers[self._twins[target]] = (name, read)
            elif self._stage is not None and not self._stage.holds(target):
                continue
            elif pattern is None:
                self._place(target, name, read)
            else:
                mapper.collect(target, pattern, name, read)
        for target, tensor in mapper.converted():
            self._place(target, target, _constant(tensor))
        progress(len(tensors), len(tensors))

    def _place(self, target: str, name: str, read: Reader) -> None:
        if target in self._waiting:
            tensor = read()
            if tensor.shape != self._waiting[target]:
                raise CheckpointError(
                    f"{name} has the shape {list(tensor.shape)} and the model wants {list(self._waiting[target])}"
                )
            _set_parameter(self._model, target, self._converted(target, tensor))
            del self._waiting[target]
        elif target in self._buffers:
            self._buffers[target].copy_(read())
        elif not any(p.search(target) or p.search(name) for p in hf.ignored_keys(self._model)):
            self._unexpected.append(name)

    def _place_twins(self) -> None:
        """A tied parameter whose twin is on another stage has been stored under its own name, or under the twin's."""
        for target, (name, read) in self._twin_readers.items():
            if target in self._waiting:
                self._place(target, name, read)

    def _converted(self, target: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            raise CheckpointError(f"{target} is stored as {tensor.dtype}: quantised checkpoints are not supported")
        return tensor.to(self._device, torch.float32 if self._keeps_float32(target) else self._dtype)

    def _tie(self) -> None:
        """Share what the config ties. If both are stored and differ, both are kept, as transformers does."""
        for target, source in self._tied.items():
            if source in self._waiting and target not in self._waiting:
                source, target = target, source
            if source in self._waiting:
                continue
            shared = self._model.get_parameter(source)
            if target not in self._waiting and not torch.equal(shared, self._model.get_parameter(target)):
                self.warnings.append(
                    f"the config ties {target} to {source}, but the checkpoint holds both and they differ: "
                    "both are used as they are (tie_word_embeddings should be false)"
                )
                continue
            _set_parameter(self._model, target, shared)
            self._waiting.pop(target, None)

    def _check_missing(self, folder: Path) -> None:
        if self._waiting:
            missing = _shortened(self._waiting)
            raise CheckpointError(f"the checkpoint in {folder} lacks {len(self._waiting)} tensor(s): {missing}")


def _shortened(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _set_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    value = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    model.get_submodule(parent)._parameters[leaf] = value


def own_memory(model: nn.Module, device: torch.device) -> None:
    """Copy parameters that are still views of a mapped file, and move the buffers to the device."""
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in copies:
                copies[id(param)] = param if param.is_cuda else nn.Parameter(param.clone(), requires_grad=False)
            module._parameters[name] = copies[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
