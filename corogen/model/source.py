"""What a model name stands for: a folder, a GGUF file, the short name "demo", or a model on the Hugging Face hub."""

from __future__ import annotations

import importlib
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corogen.errors import ModelNotFound
from corogen.model.demo import DEMO, demo_model

#: called with (what is going on, bytes done, bytes in all or 0); also from other threads
Progress = Callable[[str, int, int], None]

#: what is fetched of a hub model: its weights, config, tokenizer and templates
_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_SAFETENSORS, _BIN = ["*.safetensors"], ["*.bin"]
#: second copies of the weights in other forms, and other frameworks' folders
_NOT = ["consolidated*", "*/*.safetensors", "*/*.bin", "*/*.json", "*/*.model", "*/*.txt"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_HUB_FILE = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)/(?P<file>[^/]+\.gguf)", re.ASCII)

_POSSIBLE = (
    f'a model is a folder with a config.json, a .gguf file, a hub id such as "owner/name", "owner/name/FILE.gguf", '
    f'or "{DEMO}"'
)


def resolve_model(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The model folder or .gguf file that `name` stands for, downloaded first if need be. Blocks; takes no torch.

    What is there locally goes first, only "demo" always is the demo model (a folder of that name is "./demo").
    Downloads follow the hub's own variables (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE).

    Args:
        revision: a hub id's branch, tag or commit.
        download_dir: where hub downloads go; None: the hub's cache.

    Raises:
        ModelNotFound: naming the value, what is wrong and what is possible.
    """
    if not isinstance(name, str | os.PathLike) or not str(name).strip():
        raise ModelNotFound(f"{name!r} is no model name: {_POSSIBLE}")
    name = os.fspath(name)
    if name == DEMO:
        return demo_model(progress)
    try:
        path = Path(name).expanduser()
        if path.exists():
            return local_model(path)
    except (OSError, RuntimeError, ValueError) as error:  # too long, not readable, of an unknown user
        raise ModelNotFound(f"{textwrap.shorten(name, 200)!r} can not be looked up: {error}") from error
    if (match := _HUB_FILE.fullmatch(name)) and not _looks_local(name):
        return _hub_file(match["id"], match["file"], revision, download_dir, progress)
    if _looks_local(name) or not _HUB_ID.fullmatch(name):
        raise ModelNotFound(f"there is no file or folder {name!r}: {_POSSIBLE}")
    return _hub_model(name, revision, download_dir, progress)


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name


def local_model(path: Path) -> Path:
    """`path` if it is a model: a .gguf file, or a folder with a config.json or exactly one .gguf file.

    Raises:
        ModelNotFound: saying what is missing.
    """
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{path} is a file, and of single files only .gguf is a model: {_POSSIBLE}")
        return path
    if not path.is_dir():
        raise ModelNotFound(f"{path} is neither a file nor a folder: {_POSSIBLE}")
    if (path / "config.json").is_file():
        return path
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) == 1:
        return files[0]
    raise ModelNotFound(_what_is_missing(path, files))


def _what_is_missing(folder: Path, ggufs: list[Path]) -> str:
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        return f"{folder} holds several .gguf files ({names}): give the path of one"
    if (folder / "adapter_config.json").is_file():
        return f"{folder} is a LoRA adapter: merge it into its base model and give that folder"
    if (folder / "model_index.json").is_file():
        return f"{folder} is a diffusion pipeline, not a language model: {_POSSIBLE}"
    if not any(folder.iterdir()):
        return f"{folder} is empty: {_POSSIBLE}"
    return f"{folder} has no config.json (and no .gguf file), so it is no model: {_POSSIBLE}"


# -- the hub


def _hub_model(name: str, revision: str | None, download_dir: str | None, progress: Progress | None) -> Path:
    def fetch(weights: list[str]) -> Path:
        from huggingface_hub import snapshot_download

        options = _hub_options(revision, download_dir, progress)
        return Path(snapshot_download(name, allow_patterns=[*weights, *_FILES], ignore_patterns=_NOT, **options))

    folder = _ask_hub(name, lambda: fetch(_SAFETENSORS))
    if not any(folder.glob("*.safetensors")):
        folder = _ask_hub(name, lambda: fetch(_BIN))
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{name!r} on the hub has no config.json, so it is no model in the transformers format; for a repository "
            f'of GGUF files name the file, as "{name}/FILE.gguf"'
        )
    return folder


def _hub_file(name: str, file: str, revision: str | None, download_dir: str | None, progress: Progress | None) -> Path:
    def fetch() -> Path:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, file, **_hub_options(revision, download_dir, progress)))

    return _ask_hub(f"{name}/{file}", fetch)


def _hub_options(revision: str | None, download_dir: str | None, progress: Progress | None) -> dict[str, Any]:
    return {"revision": revision, "cache_dir": download_dir, "tqdm_class": _bar(progress)}


def _ask_hub(name: str, fetch: Callable[[], Path]) -> Path:
    """Run `fetch`; the hub's and the network's errors become one of ours: what to try, then their own cause."""
    try:
        return fetch()
    except Exception as error:
        raise ModelNotFound(
            f"there is no folder {name!r}, and the hub can not supply a model of that name: "
            f"{_remedy(type(error).__name__)}\n"
            f"  {_POSSIBLE}\n"
            f"  the hub's client said: {_last_cause(error)}"
        ) from error


#: longest line of the hub's words; the whole is chained to the error
_CAUSE_CHARS = 160


def _last_cause(error: BaseException) -> str:
    """What began it, in one short line."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    first = next(iter(str(error).strip().splitlines()), "")
    return textwrap.shorten(f"{type(error).__name__}: {first}", _CAUSE_CHARS, placeholder=" ...")


_REMEDIES = {
    "RepositoryNotFoundError": "check the spelling; for a private model set HF_TOKEN",
    "GatedRepoError": "accept the model's terms on its page, then set HF_TOKEN",
    "RevisionNotFoundError": "check the revision",
    "RemoteEntryNotFoundError": "check the file's name",
    "HFValidationError": "check the spelling",
}


def _remedy(kind: str) -> str:
    return _REMEDIES.get(kind, "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local folder")


def _bar(progress: Progress | None) -> type[Any]:
    """A silent progress bar class for the hub's client, which hands bytes on to `progress`."""
    base: type[Any] = importlib.import_module("huggingface_hub.utils").tqdm

    def init(self: Any, *args: Any, **options: Any) -> None:
        self.counts_bytes = options.get("unit") == "B"
        base.__init__(self, *args, **{**options, "disable": True})

    def update(self: Any, n: float | None = 1) -> None:
        self.n += n or 0
        if progress is not None and self.counts_bytes and self.n:
            progress("download", int(self.n), int(self.total or 0))

    return type("Bar", (base,), {"__init__": init, "update": update})  # a class statement would need its types
