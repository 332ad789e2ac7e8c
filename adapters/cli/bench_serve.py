"""`corogen bench serve`: load on a server, ours or another with OpenAI's API."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corogen.adapters.cli.options import EngineOptions, OutputOptions
from corogen.errors import ConfigError

if TYPE_CHECKING:
    from corogen.adapters.bench.serve import Ask


def parse_rate(value: str) -> str:
    """A check for a number above 0, or "inf"."""
    try:
        good = float(value) > 0
    except ValueError:
        good = False
    if not good:
        raise typer.BadParameter(f'{value!r} is no number above 0, nor "inf"')
    return value


@dataclass(frozen=True)
class LoadOptions:
    """What is asked, and how fast."""

    url: Annotated[str, typer.Option("--url", "--base-url", help="The server, without /v1.")] = "http://127.0.0.1:8000"
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="Name of the model there; asked for when left out.")
    ] = None
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The key.", show_envvar=True)] = None
    num_prompts: Annotated[int, typer.Option(help="Requests.", min=1)] = 64
    request_rate: Annotated[
        str, typer.Option(help='Requests a second, at random (Poisson); "inf": all at once.', callback=parse_rate)
    ] = "inf"
    max_concurrency: Annotated[int | None, typer.Option(help="Requests at a time, at most.", min=1)] = None
    output_len: Annotated[int, typer.Option(help="New tokens of each answer, at most.", min=1)] = 64
    input_len: Annotated[int | None, typer.Option(help="Random prompts of so many token ids, at most.", min=1)] = None
    random_range: Annotated[
        float, typer.Option(help="Random lengths down to (1 - this) of those given.", min=0, max=0.999)
    ] = 0.0
    vocab_size: Annotated[int, typer.Option(help="Random token ids stay below it.", min=2)] = 30_000
    dataset: Annotated[Path | None, typer.Option(help="ShareGPT's .json, or a file with one prompt a line.")] = None
    ignore_eos: Annotated[
        bool, typer.Option(help="Every answer has its full length; OpenAI's own servers do not know this.")
    ] = False
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Bound in milliseconds that a good request meets, as ttft:500; also tpot, e2e; repeatable."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of arrivals and random prompts.")] = 0

    @property
    def objectives(self) -> dict[str, float]:
        """The bounds of --goodput. Raises typer.BadParameter."""
        from corogen.adapters.bench.serve import OBJECTIVES

        found = {}
        for item in self.goodput or ():
            name, _, bound = item.partition(":")
            try:
                found[name] = float(bound)
            except ValueError:
                name = ""
            if name not in OBJECTIVES:
                raise typer.BadParameter(f"{item!r} is not one of {', '.join(f'{n}:MS' for n in OBJECTIVES)}")
        return found

    def asks(self) -> list[Ask]:
        """The requests."""
        from corogen.adapters.bench import serve_workload as workload

        if self.dataset is not None:
            return workload.asks_from(self.dataset, self.num_prompts, self.output_len, seed=self.seed)
        if self.input_len is None:
            return workload.story_asks(self.num_prompts, self.output_len)
        return workload.random_asks(
            self.num_prompts,
            self.input_len,
            self.output_len,
            spread=self.random_range,
            vocab_size=self.vocab_size,
            seed=self.seed,
        )


def run_load(options: LoadOptions) -> dict[str, Any]:
    """Ask the server everything; figures, JSON-ready."""
    from corogen.adapters.bench.serve import Load, Target, measure

    objectives, asks, rate = options.objectives, options.asks(), float(options.request_rate)
    extra = {"ignore_eos": True} if options.ignore_eos else {}
    url = options.url.rstrip("/").removesuffix("/v1")
    target = Target(
        url, options.served_model or _first_model(url, options.api_key), options.api_key,
        chat=options.input_len is None, extra=extra,
    )  # fmt: skip
    load = Load(None if math.isinf(rate) else rate, options.max_concurrency, options.seed)
    result = measure(target, asks, load, objectives=objectives)
    return {"url": url, "model": target.model, "output_len": options.output_len, **result}


def _first_model(url: str, api_key: str | None) -> str:
    import httpx

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=30)
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{url}/v1/models does not say which model is served: {error}; see --served-model") from error


def run_comparison(
    engine: EngineOptions, output: OutputOptions, options: LoadOptions, *, pairs: int, say: Any
) -> dict[str, Any]:
    """HTTP against the pipeline in this process, in alternating pairs; JSON-ready."""
    from corogen.adapters.bench.serve_compare import measure, server_process
    from corogen.adapters.cli.serving import open_pipeline

    os.environ.pop("COROGEN_API_KEYS", None)
    pipe, _ = open_pipeline(engine.model, engine.config(), quiet=output.quiet)
    with pipe, server_process(engine.model) as url:
        shape = {"count": options.num_prompts, "output_len": options.output_len}
        return {"model": engine.model, **measure(pipe, url, pairs=pairs, say=say, **shape)}
