"""Every message between the engine and its workers. For generation ids and numbers only; no tensor ever travels.

A worker keeps one *slot* per running sequence: its sampling settings, its block table, its length (tokens whose keys
and values are computed), and its last token. The engine sends differences: what a step needs beyond that.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence's next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    #: random numbers are keyed by (seed, absolute position of the sampled token)
    seed: int = 0
    #: ids that can not be chosen before position `suppress_until`
    suppress_ids: tuple[int, ...] = ()
    suppress_until: int = 0
    #: ids that can never be chosen
    banned_ids: tuple[int, ...] = ()
    #: over prompt and answer, as Hugging Face defines it; 1 is off
    repetition_penalty: float = 1.0
    #: over the answer alone, as OpenAI defines them; 0 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class SlotInit(msgspec.Struct, frozen=True, array_like=True):
    """Slot `slot` now belongs to a new (or resumed) sequence: forget what was there.

    `num_cached` tokens are in the blocks already (prefix cache), so the first prefill row starts there.
    """

    slot: int
    prompt_len: int
    num_cached: int
    sampling: Sampling
    #: the first `num_cached` ids, sent only when the sampling settings count tokens (penalties)
    cached_ids: tuple[int, ...] = ()


class PrefillRow(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start .. start + len(token_ids)` of a sequence; the next token is sampled if `sample`."""

    slot: int
    start: int
    token_ids: list[int]
    sample: bool


class SlotBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks to append to a slot's block table, in order."""

    slot: int
    blocks: list[int]


class StepInput(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One step. A decode row is a slot alone: the worker has its last token, position and block table.

    The result's tokens are in this order: one per entry of `decode`, then one per prefill row with `sample`.
    Apply `init`, then `blocks`, then compute. Keys and values of every token in the step are written to the cache.
    """

    step: int
    epoch: int
    init: list[SlotInit]
    blocks: list[SlotBlocks]
    decode: list[int]
    prefill: list[PrefillRow]


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """The sampled ids of one step, in the order that `StepInput` defines."""

    step: int
    epoch: int
    tokens: list[int]


class StepError(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    """The step raised; nothing of it counts. Later steps of the same epoch are answered by `StepSkipped`."""

    step: int
    epoch: int
    traceback: str
    #: name of the exception's class
    kind: str = ""


class StepSkipped(msgspec.Struct, frozen=True, array_like=True, tag="skipped"):
    """The step was not computed because an earlier one of its epoch failed."""

    step: int
    epoch: int


class WorkerSpec(msgspec.Struct, frozen=True, array_like=True, tag="spec"):
    """The first message to a worker: what to load, and how to import what the parent can import."""

    model_path: str
    rank: int
    world_size: int
    sys_path: list[str]
    device: str
    dtype: str
    block_size: int
    num_blocks: int | None
    cache_fraction: float
    max_slots: int
    max_step_tokens: int
    session_len: int | None
    num_threads: int
    hf_overrides: dict[str, Any] = {}
    eager_mode: bool = False
    random_weights: bool = False


#: what happens in the phases of a start, for people; they come in this order, the first two only if there is need
PHASES = {
    "download": "downloading the model",
    "import": "importing torch and transformers",
    "convert": "converting the GGUF file",
    "build": "building the model",
    "load": "reading the weights",
    "cache": "reserving the KV cache",
    "warmup": "first forward",
}


class StartPhase(msgspec.Struct, frozen=True, array_like=True, tag="phase"):
    """A worker enters a start-up phase; `done` and `total` are for progress bars (0 when unknown)."""

    name: str
    done: int = 0
    total: int = 0

    @property
    def words(self) -> str:
        """What happens in this phase."""
        return PHASES.get(self.name, self.name)

    def __str__(self) -> str:
        """Such as "reading the weights: 40 %", so that `progress=print` can be read."""
        return f"{self.words}: {100 * self.done // self.total} %" if self.total else self.words


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A worker can take steps."""

    num_blocks: int
    #: positions that the model can address, after overrides and scaling
    max_positions: int
    vocab_size: int
    dtype: str
    device: str
    #: seconds by phase
    phases: dict[str, float]
    #: one-line warnings for the user, such as weights without a place
    warnings: list[str] = []


class WorkerFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Start-up failed. `kind` is the class name in `corogen.errors`, when it is one of ours."""

    phase: str
    kind: str
    message: str
    traceback: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Finish what was sent before, then exit with code 0."""


class TaskSpec(msgspec.Struct, frozen=True, array_like=True, tag="task_spec"):
    """The first message to a worker of tasks: what builds its model."""

    #: (model_fn, its keyword arguments), pickled by value where that is needed
    model: bytes
    sys_path: list[str]
    device: str = "auto"
    num_threads: int = 0
    rank: int = 0
    tp: int = 1
    pp: int = 1


class TaskInput(msgspec.Struct, frozen=True, array_like=True, tag="task"):
    """One batch: `body` is its input, see `corogen.tasks.payload`."""

    step: int
    body: bytes


class TaskOutput(msgspec.Struct, frozen=True, array_like=True, tag="task_output"):
    """What the model made of a batch."""

    step: int
    body: bytes


class TaskError(msgspec.Struct, frozen=True, array_like=True, tag="task_error"):
    """The model, or taking its input apart, raised; `body` is the exception if that can be pickled, else empty."""

    step: int
    traceback: str
    #: name of the exception's class
    kind: str
    body: bytes


ToWorker = WorkerSpec | StepInput | TaskSpec | TaskInput | Shutdown
FromWorker = StepOutput | StepError | StepSkipped | TaskOutput | TaskError | StartPhase | WorkerReady | WorkerFailed
