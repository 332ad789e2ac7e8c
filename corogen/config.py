"""How an engine is set up: `EngineConfig` and the check that lists everything wrong with one."""

from __future__ import annotations

import difflib
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar

from corogen.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICE_TYPES = ("auto", "cpu", "cuda")
BACKENDS = ("uni", "mp")
FAILURE_POLICIES = ("resume", "fail")

THREAD_SAFE_MESSAGE = (
    "thread_safe=True is not a mode of this engine: one event-loop thread owns it, and every adapter may be called "
    "from any thread already. Drop the argument; in new code `await pipe.async_batch_infer(...)`, in threads "
    "`pipe.infer(...)` or `pipe.submit(...)`, and for applications built on queues corogen.adapters.QueueAdapter"
)

#: LMDeploy's fields that corogen does not have: name -> (LMDeploy's default, what to do instead)
_FOREIGN: dict[str, tuple[Any, str]] = {
    "dp": (1, "run several engines"),
    "dp_rank": (0, "run several engines"),
    "ep": (1, "experts are split by tp"),
    "attn_tp_size": (None, "use tp"),
    "mlp_tp_size": (None, "use tp"),
    "moe_tp_size": (None, "use tp"),
    "prefill_interval": (16, "prefill and decode share every step; see max_prefill_token_num"),
    "kernel_block_size": (-1, "use block_size"),
    "num_cpu_blocks": (0, "preempted requests are computed again, nothing is swapped"),
    "adapters": (None, "LoRA is not supported; merge the adapter into the weights"),
    "cudagraph_capture_batch_sizes": (None, "leave it out"),
    "prefix_cache_state_budget": (0, "leave it out"),
    "prefix_cache_decode_state_interval": (0, "leave it out"),
    "custom_module_map": (None, "register the class with transformers"),
    "quant_policy": (0, "the KV cache is kept in the model's dtype"),
    "empty_init": (False, "leave it out"),
    "enable_microbatch": (False, "leave it out"),
    "enable_eplb": (False, "leave it out"),
    "enable_mp_engine": (False, "workers are processes already"),
    "mp_engine_backend": ("mp", "workers are processes already"),
    "model_format": (None, "weights are loaded as they are stored"),
    "enable_metrics": (True, "use pipe.stats() and pipe.step_log()"),
    "language_model_only": (False, "only text models are supported"),
    "logprobs_mode": (None, "leave it out"),
    "enable_return_routed_experts": (False, "leave it out"),
    "enable_transfer_obj_ref": (False, "leave it out"),
    "dllm_block_length": (None, "diffusion models are not supported"),
    "dllm_unmasking_strategy": ("low_confidence_dynamic", "diffusion models are not supported"),
    "dllm_denoising_steps": (None, "diffusion models are not supported"),
    "dllm_confidence_threshold": (0.85, "diffusion models are not supported"),
    "role": (None, "prefill and decode share one engine"),
    "migration_backend": (None, "prefill and decode share one engine"),
}

Config = TypeVar("Config")


def refuse_unknown_fields(
    error: Callable[[dict[str, str]], Exception],
    *,
    foreign: Mapping[str, tuple[Any, str]] = MappingProxyType({}),
    other_names: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[type[Config]], type[Config]]:
    """Let a dataclass turn keywords that it does not have into an error that says what to use instead.

    Args:
        error: makes it of what is wrong, by keyword.
        foreign: keywords of others that are dropped with their default: name -> (that default, what to do instead).
        other_names: what fields are called elsewhere: that name -> the field.
    """

    def explain(name: str, value: Any, known: set[str]) -> str:
        if name in foreign:
            default, instead = foreign[name]
            return "" if value == default else f"{name}={value!r}, a setting of LMDeploy, is not supported: {instead}"
        close = [other_names[name]] if name in other_names else difflib.get_close_matches(name, known, n=1)
        return f"there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")

    def decorate(cls: type[Config]) -> type[Config]:
        generated: Callable[..., None] = cls.__init__
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]

        @functools.wraps(generated)
        def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
            unknown = {name: explain(name, options.pop(name), known) for name in [*options] if name not in known}
            problems = {name: problem for name, problem in unknown.items() if problem}
            if problems:
                raise error(problems)
            generated(self, *args, **options)

        cls.__init__ = __init__  # type: ignore[method-assign]
        return cls

    return decorate


@refuse_unknown_fields(lambda problems: ConfigError(list(problems.values())), foreign=_FOREIGN)
@dataclass
class EngineConfig:
    """Settings of one engine; names and meanings follow LMDeploy's `PytorchEngineConfig` where they make sense.

    Raises:
        ConfigError: at once for a name that does not exist, and when an engine is made for everything else.
    """

    #: "auto" (the checkpoint's own on a GPU, float32 on a CPU), "float32", "float16" or "bfloat16"
    dtype: str = "auto"
    #: tensor-parallel ranks
    tp: int = 1
    #: pipeline-parallel stages
    pp: int = 1
    #: prompt and answer together, in tokens; None: what the model and the cache allow
    session_len: int | None = None
    #: requests that run at once; None: 64 on a CPU, 256 on a GPU
    max_batch_size: int | None = None
    #: share of the memory that is free after loading the weights which the KV cache may take; in (0, 1)
    cache_max_entry_count: float = 0.8
    #: exact number of KV blocks; 0: from cache_max_entry_count
    num_gpu_blocks: int = 0
    #: tokens a block; None: 16 on a CPU, 64 on a GPU
    block_size: int | None = None
    #: tokens that one step computes at most, and so the size of a prompt's chunks; None: 256 on a CPU, 2048 on a GPU
    max_prefill_token_num: int | None = None
    #: keep the blocks of finished requests so that a prompt with the same beginning need not compute it again
    enable_prefix_caching: bool = True
    #: "auto" (a GPU if there is one), "cpu" or "cuda"
    device_type: str = "auto"
    #: indices of the GPUs to use; None: the first tp * pp
    devices: list[int] | None = None
    #: no CUDA graphs
    eager_mode: bool = False
    #: no weights are read, random numbers stand in for them: for measurements in the shape of a model
    random_weights: bool = False
    #: "mp" (one process a device, the default) or "uni" (in the engine's own thread, for debugging)
    distributed_executor_backend: str | None = None
    #: requests that may be outstanding (running and waiting); 0: no bound
    queue_size: int = 0
    #: prompt tokens that may wait for their turn, over all requests; 0: no bound
    max_waiting_tokens: int = 0
    #: a hub id's branch, tag or commit
    revision: str | None = None
    #: where hub downloads go; None: the hub's usual cache
    download_dir: str | None = None
    #: keys of the model's config.json to replace
    hf_overrides: dict[str, Any] | None = None
    #: sampling defaults for requests that sample: "auto" (the model's generation_config.json), "none", or a file
    generation_config: str = "auto"
    #: a Jinja file or text to use instead of the model's own chat template
    chat_template: str | None = None
    #: CPU threads of a worker; None: what the affinity and the cgroup's quota allow
    num_threads: int | None = None
    #: seconds until the workers must be ready (loading and converting included); None: no bound
    start_timeout_s: float | None = 1800.0
    #: seconds that one step may take before its worker counts as hung; None: no bound
    step_timeout_s: float | None = 300.0
    #: "resume" (requests go on after the workers have started again) or "fail" (those that ran get the error)
    on_worker_failure: str = "resume"
    #: write prompts to the log "corogen.requests" (level INFO); otherwise no text of a request is ever logged
    log_prompts: bool = False
    #: there only to be refused, see `corogen.config.THREAD_SAFE_MESSAGE`
    thread_safe: bool = False


PytorchEngineConfig = EngineConfig


def check_config(config: EngineConfig) -> None:
    """Raise one ConfigError that names every fault of `config`. Nothing is downloaded or started here."""
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"backend_config must be an EngineConfig, not {type(config).__name__}")
    problems = list(_problems(config))
    if problems:
        raise ConfigError(problems)


def _problems(config: EngineConfig) -> list[str]:
    found = [THREAD_SAFE_MESSAGE] if config.thread_safe else []
    found += _number_problems(config)
    found += _choice_problems(config)
    found += _type_problems(config)
    return found


#: field -> (lowest value, highest value, whether None is allowed)
_WHOLE_NUMBERS = {
    "tp": (1, 4096, False),
    "pp": (1, 4096, False),
    "session_len": (2, 2**31, True),
    "max_batch_size": (1, 65_536, True),
    "num_gpu_blocks": (0, 2**24, False),
    "block_size": (1, 65_536, True),
    "max_prefill_token_num": (1, 2**24, True),
    "queue_size": (0, 2**63, False),
    "max_waiting_tokens": (0, 2**63, False),
    "num_threads": (1, 65_536, True),
}


def _number_problems(config: EngineConfig) -> list[str]:
    found = []
    for name, (low, high, optional) in _WHOLE_NUMBERS.items():
        value = getattr(config, name)
        if not (optional and value is None) and (type(value) is not int or not low <= value <= high):
            bounds = f"of at least {low}" if type(value) is not int or value < low else f"of at most {high}"
            found.append(f"{name} must be a whole number {bounds}{', or None' * optional}, not {value!r}")
    share = config.cache_max_entry_count
    if not _is_number(share) or not 0 < share < 1:
        found.append(f"cache_max_entry_count must lie between 0 and 1, both excluded, not {share!r}")
    for name in ("start_timeout_s", "step_timeout_s"):
        value = getattr(config, name)
        if value is not None and (not _is_number(value) or value <= 0):
            found.append(f"{name} must be a number of seconds above 0, or None, not {value!r}")
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _choice_problems(config: EngineConfig) -> list[str]:
    found = []
    if config.dtype not in DTYPES:
        found.append(f"dtype must be one of {', '.join(DTYPES)}, not {config.dtype!r}")
    if config.device_type not in DEVICE_TYPES:
        found.append(f"device_type must be one of {', '.join(DEVICE_TYPES)}, not {config.device_type!r}")
    if config.distributed_executor_backend not in (None, *BACKENDS):
        found.append(
            f"distributed_executor_backend must be one of {', '.join(BACKENDS)}, or None, "
            f"not {config.distributed_executor_backend!r}"
        )
    if config.on_worker_failure not in FAILURE_POLICIES:
        found.append(
            f"on_worker_failure must be one of {', '.join(FAILURE_POLICIES)}, not {config.on_worker_failure!r}"
        )
    if type(config.tp) is int and type(config.pp) is int and config.tp * config.pp > 1:
        found.append(f"tp={config.tp}, pp={config.pp}: this version runs on one device; set both to 1")
    return found


_SWITCHES = ("enable_prefix_caching", "eager_mode", "random_weights", "log_prompts", "thread_safe")


def _type_problems(config: EngineConfig) -> list[str]:
    kinds = {
        "True or False": (bool, _SWITCHES),
        "a string or None": (str | None, ("revision", "download_dir", "chat_template")),
        "a dict or None": (dict | None, ("hf_overrides",)),
    }
    found = [
        f"{name} must be {what}, not {getattr(config, name)!r}"
        for what, (kind, names) in kinds.items()
        for name in names
        if not isinstance(getattr(config, name), kind)
    ]
    if isinstance(config.chat_template, str) and _names_no_file(config.chat_template):
        found.append(f"chat_template={config.chat_template!r} is neither a file that exists nor a Jinja template")
    if not isinstance(config.generation_config, str) or not config.generation_config:
        found.append(f'generation_config must be "auto", "none" or a path, not {config.generation_config!r}')
    devices = config.devices
    if devices is not None and (
        not isinstance(devices, list) or not devices or any(type(d) is not int or d < 0 for d in devices)
    ):
        found.append(f"devices must be a list of device indices such as [0], or None, not {devices!r}")
    return found


def _names_no_file(template: str) -> bool:
    """Whether a chat template can only be meant as a file, and there is none."""
    return "\n" not in template and "{" not in template and not os.path.exists(os.path.expanduser(template))
