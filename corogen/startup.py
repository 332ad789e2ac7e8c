"""What happens once, before the first request: the model found, the workers made, the cache divided."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from corogen.config import EngineConfig
from corogen.errors import ConfigError
from corogen.params import ModelFacts
from corogen.schedule import BlockPool, Scheduler
from corogen.text.pool import TextPool
from corogen.wire.messages import StartPhase, WorkerReady, WorkerSpec
from corogen.workers.cpus import usable_cpus

if TYPE_CHECKING:
    from corogen.admission import Admission, TextFiles
    from corogen.text.tokenizer import Tokenizer
    from corogen.workers.executor import Executor

logger = logging.getLogger("corogen.engine")

#: defaults by device: requests at once, tokens a step, tokens a block
_CPU_DEFAULTS = (64, 256, 16)
_GPU_DEFAULTS = (256, 2048, 64)


Progress = Callable[[StartPhase], None]


def harmless(progress: Progress) -> Progress:
    """`progress`, whose exceptions are logged: what a caller wants to show must not end the start."""

    def call(phase: StartPhase) -> None:
        try:
            progress(phase)
        except Exception:
            logger.exception("the progress callback failed in phase %s", phase.name)

    return call


async def find_model(model: str, config: EngineConfig, pool: TextPool, progress: Progress) -> Path:
    """The folder or `.gguf` file of `model`, downloaded if need be.

    Raises:
        ModelNotFound: see `resolve_model`.
    """
    from corogen.model.source import resolve_model

    loop = asyncio.get_running_loop()

    def report(what: str, done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, StartPhase(what, done, total))

    resolve = functools.partial(
        resolve_model, model, revision=config.revision, download_dir=config.download_dir, progress=report
    )
    return await pool.run(resolve)


async def start_workers(
    executor: Executor, spec: WorkerSpec, path: Path | None, config: EngineConfig, pool: TextPool, progress: Progress
) -> tuple[WorkerReady, TextFiles | None]:
    """Start the workers. Tokenizer and chat template are read meanwhile, so that a fault in them shows early."""
    from corogen.admission import TextFiles

    start = asyncio.get_running_loop().create_task(executor.start(spec, progress))
    try:
        folder = None if path is None else _text_folder(path)
        files = await pool.run(TextFiles.read, folder, config) if folder is not None and folder.is_dir() else None
        ready = await start
    except BaseException:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        raise
    if folder is not None and files is None:  # the workers have just made it
        files = await pool.run(TextFiles.read, folder, config)
    return ready, files


def make_executor(config: EngineConfig) -> Executor:
    """What `distributed_executor_backend` names."""
    if config.distributed_executor_backend == "uni":
        from corogen.workers.executor import InlineExecutor

        return InlineExecutor()
    from corogen.workers.processes import ProcessExecutor

    return ProcessExecutor(start_timeout_s=config.start_timeout_s, step_timeout_s=config.step_timeout_s)


def worker_spec(config: EngineConfig, path: Path | None) -> WorkerSpec:
    """What a worker has to know before it can load."""
    device = _device(config)
    return WorkerSpec(
        model_path=str(path or ""),
        rank=0,
        world_size=1,
        sys_path=[os.path.abspath(p) for p in sys.path if p],
        device=device,
        dtype=config.dtype,
        block_size=config.block_size or (_CPU_DEFAULTS if device == "cpu" else _GPU_DEFAULTS)[2],
        num_blocks=config.num_gpu_blocks or None,
        cache_fraction=config.cache_max_entry_count,
        max_slots=_max_batch_size(config, device),
        max_step_tokens=_token_budget(config, device),
        session_len=config.session_len,
        num_threads=config.num_threads or usable_cpus(),
        hf_overrides=config.hf_overrides or {},
        eager_mode=config.eager_mode,
        random_weights=config.random_weights,
    )


def make_scheduler(config: EngineConfig, ready: WorkerReady, block_size: int) -> Scheduler:
    """A scheduler over the blocks that the workers have."""
    return Scheduler(
        BlockPool(ready.num_blocks),
        block_size=block_size,
        max_batch_size=_max_batch_size(config, ready.device),
        token_budget=_token_budget(config, ready.device),
        prefix_caching=config.enable_prefix_caching,
    )


def max_len(config: EngineConfig, ready: WorkerReady, block_size: int) -> int:
    """Tokens of prompt and answer together. Raises ConfigError if more were asked for than the model has positions."""
    wanted = config.session_len
    if wanted is not None and wanted > ready.max_positions:
        raise ConfigError(
            f"session_len={wanted} is more than the {ready.max_positions} positions of the model: lower it, or "
            "extend the model through hf_overrides"
        )
    return min(wanted or ready.max_positions, ready.num_blocks * block_size)


def _text_folder(path: Path) -> Path:
    """Where the tokenizer and the chat template of the model at `path` are, or will be once a worker has converted it.

    Raises:
        ModelNotFound: there is no such file.
    """
    from corogen.model.gguf import converted_folder

    return converted_folder(path) if path.suffix == ".gguf" else path


def make_admission(
    config: EngineConfig, files: TextFiles | None, tokenizer: Tokenizer | None, max_len: int, vocab_size: int
) -> Admission:
    """From the model's `files`; without a model, from `tokenizer` alone."""
    from corogen.admission import Admission

    if files is not None:
        return Admission.from_files(files, config, max_len=max_len, vocab_size=vocab_size)
    if tokenizer is None:
        return Admission(None, None, ModelFacts(max_len, vocab_size))
    facts = ModelFacts(max_len, vocab_size, frozenset(tokenizer.eos_ids), added_tokens=tokenizer.added_tokens)
    return Admission(tokenizer, None, facts)


def describe(ready: WorkerReady, block_size: int, max_len: int) -> str:
    """One line for the log: what the cache holds."""
    fit = ready.num_blocks * block_size // max_len
    return (
        f"ready on {ready.device} in {ready.dtype}: {ready.num_blocks} blocks of {block_size} tokens, sequences "
        f"of up to {max_len} tokens, of which {fit} fit at once"
    )


def _max_batch_size(config: EngineConfig, device: str) -> int:
    return config.max_batch_size or (_CPU_DEFAULTS if device == "cpu" else _GPU_DEFAULTS)[0]


def _token_budget(config: EngineConfig, device: str) -> int:
    return config.max_prefill_token_num or (_CPU_DEFAULTS if device == "cpu" else _GPU_DEFAULTS)[1]


def _device(config: EngineConfig) -> str:
    """The device to ask for. A worker that was asked for "auto" looks for itself; batch sizes follow this guess."""
    no_gpu = not Path("/dev/nvidiactl").exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if config.device_type == "cpu" or (config.device_type == "auto" and no_gpu):
        return "cpu"
    if no_gpu and sys.platform == "linux" and not Path("/dev/kfd").exists():
        raise ConfigError(
            "device_type='cuda', and this machine shows no GPU (no /dev/nvidiactl, or CUDA_VISIBLE_DEVICES is empty): "
            "use device_type='cpu', or 'auto'"
        )
    name = config.device_type if config.device_type == "cuda" else "auto"
    return f"cuda:{config.devices[0]}" if config.devices else name
