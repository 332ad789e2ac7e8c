"""Options that several commands share, as groups, and what they turn into."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from corogen.config import DEVICE_TYPES, DTYPES, EngineConfig
from corogen.params import GenerationConfig


def one_of(*allowed: str) -> Callable[[str | None], str | None]:
    """A check for an option that takes one of a few words; None passes."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}")
        return value

    return check


@dataclass(frozen=True)
class EngineOptions:
    """Which model, and how it is served."""

    model: Annotated[
        str,
        typer.Option("--model", "-m", help='A folder, a .gguf file, a hub id, or "demo".'),
    ] = "demo"
    device_type: Annotated[str, typer.Option(help="auto, cpu or cuda.", callback=one_of(*DEVICE_TYPES))] = "auto"
    dtype: Annotated[
        str,
        typer.Option(help="auto, float32, float16 or bfloat16.", callback=one_of(*DTYPES)),
    ] = "auto"
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", min=1)] = 1
    pp: Annotated[int, typer.Option(help="Pipeline-parallel stages.", min=1)] = 1
    max_batch_size: Annotated[int | None, typer.Option(help="Requests that run at once.", min=1)] = None
    session_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.", min=2)] = None
    num_threads: Annotated[int | None, typer.Option(help="CPU threads of the worker.", min=1)] = None
    revision: Annotated[str | None, typer.Option(help="A hub id's branch, tag or commit.")] = None
    chat_template: Annotated[str | None, typer.Option(help="A Jinja file or text instead of the model's own.")] = None

    def config(self, **more: Any) -> EngineConfig:
        """The engine's settings; `more` are further fields of EngineConfig."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "model"}
        return EngineConfig(**{**{k: v for k, v in given.items() if v is not None}, **more})


@dataclass(frozen=True)
class SamplingOptions:
    """How one answer is generated. Greedy, unless one of the sampling settings is given."""

    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", help="Bound on the answer.", min=1)
    ] = None
    temperature: Annotated[float | None, typer.Option(help="Implies sampling, as the next three do.", min=0)] = None
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest tokens, of this probability together.", min=0, max=1)
    ] = None
    top_k: Annotated[int | None, typer.Option(help="0: off.", min=0)] = None
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answer.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; may be repeated.")] = None

    def config(self) -> GenerationConfig:
        """The request's settings; what was not given stays unset."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "random_seed": self.seed}
        given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        if given:
            given["do_sample"] = True
        if self.max_new_tokens is not None:
            given["max_new_tokens"] = self.max_new_tokens
        if self.stop:
            given["stop_words"] = list(self.stop)
        return GenerationConfig(**given)


_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class OutputOptions:
    """What is told beside the result."""

    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", callback=one_of(*_LEVELS))] = (
        "warning"
    )
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors.")] = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take option groups: each parameter of a group's type becomes the options of that group.

    The command's own options come first in its help.
    """
    given = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in given if dataclasses.is_dataclass(p.annotation)}
    shown = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in given if p.name not in groups]
    shown += [parameter for group in groups.values() for parameter in _parameters(group)]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
        command(**given)

    del call.__wrapped__
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in shown}
    return call


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(f.name, keyword_only, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(group)
    ]
