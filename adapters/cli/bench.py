"""`corogen bench`: the measurements of `corogen.adapters.bench`, as tables or JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corogen.adapters.cli.bench_serve import LoadOptions
from corogen.adapters.cli.console import guarded, needing, say
from corogen.adapters.cli.options import EngineOptions, OutputOptions, grouped, one_of
from corogen.errors import ConfigError

if TYPE_CHECKING:
    from corogen.adapters.bench.workload import PromptSource
    from corogen.adapters.pipeline import Pipeline

bench = typer.Typer(
    name="bench",
    help="Measure: throughput, latency, kinds of caller, the engine's own cost.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Prompts = Annotated[Path | None, typer.Option(help="A file of prompts, one a line: text or JSON.")]
InputLen = Annotated[int | None, typer.Option(help="Random prompts of exactly so many tokens.", min=1)]
OutputLen = Annotated[int, typer.Option(help="New tokens of each answer.", min=1)]
Repeat = Annotated[int, typer.Option(help="Rounds, or pairs with --compare.", min=1)]
Compare = Annotated[
    str | None, typer.Option(help='"transformers": measure it in turns with us.', callback=one_of("transformers"))
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        help="As the engine's default: what prompts begin with in common is computed once. Rounds ask differently."
    ),
]


@bench.command()
@grouped
def throughput(
    engine: EngineOptions,
    output: OutputOptions,
    num_prompts: Annotated[int, typer.Option(help="Requests, all submitted at once.", min=1)] = 32,
    output_len: OutputLen = 64,
    input_len: InputLen = None,
    prompts: Prompts = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer has its full length.")] = False,
    repeat: Repeat = 5,
    compare: Compare = None,
    peer: Annotated[
        str,
        typer.Option(
            help="How transformers generates: batch (static), continuous, or one (request).",
            callback=one_of("batch", "continuous", "one"),
        ),
    ] = "batch",
    prefix_caching: PrefixCaching = True,
    random_weights: Annotated[
        str | None,
        typer.Option(
            help="No model: random weights in the shape of llama-1b, qwen3-8b or a config.json. Prompts are 100 to "
            "1,024 random tokens, answers have their full length, a stop word is looked for; what share of the "
            "device's floor is reached is told too."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sample instead of greedy choice.", min=0)] = None,
    top_p: Annotated[float | None, typer.Option(help="The same.", min=0, max=1)] = None,
) -> None:
    """Many requests at once.

    Tokens a second, and how evenly they come.
    """
    chosen = {"temperature": temperature, "top_p": top_p}
    sampling: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if sampling:
        sampling["do_sample"] = True
    with guarded(output):
        if random_weights is not None:
            if compare or prompts is not None:
                raise typer.BadParameter("--random-weights goes with neither --compare nor --prompts")
            result = _in_shape_of(
                random_weights, engine, output, num_prompts, input_len, prefix_caching,
                output_len=output_len, repeat=repeat, sampling=sampling,
            )  # fmt: skip
            show_result("throughput", result, output)
            return
        if compare and not ignore_eos:
            raise typer.BadParameter("--compare needs --ignore-eos: both sides must generate the same number of tokens")
        count = 1 if peer == "one" and compare else num_prompts
        result = _measured(
            engine, output, count, input_len, prompts, prefix_caching,
            output_len=output_len, ignore_eos=ignore_eos, repeat=repeat, kind=peer if compare else None,
            sampling=sampling,
        )  # fmt: skip
        show_result("throughput", result, output)


@bench.command()
@grouped
def latency(
    engine: EngineOptions,
    output: OutputOptions,
    output_len: OutputLen = 64,
    input_len: InputLen = None,
    prompts: Prompts = None,
    repeat: Repeat = 5,
    compare: Compare = None,
    prefix_caching: PrefixCaching = True,
) -> None:
    """One request alone.

    Time to the first token, time between tokens, tokens a second.
    """
    with guarded(output):
        result = _measured(
            engine, output, 1, input_len, prompts, prefix_caching,
            output_len=output_len, ignore_eos=True, repeat=repeat, kind="one" if compare else None,
        )  # fmt: skip
        show_result("latency", result, output)


@bench.command()
@grouped
def callers(
    engine: EngineOptions,
    output: OutputOptions,
    num_prompts: Annotated[int, typer.Option(help="Requests of each kind of caller.", min=1)] = 64,
    output_len: OutputLen = 32,
    pairs: Annotated[
        int | None, typer.Option(help="Queue pairs of both bridges; one a request when left out.", min=1)
    ] = None,
    repeat: Annotated[int, typer.Option(help="Rounds.", min=1)] = 1,
    idle_s: Annotated[float, typer.Option(help="Seconds of each idle phase.", min=0)] = 10.0,
) -> None:
    """The kinds of caller compared.

    The same requests through coroutines, threads, futures and queues, against a bridge that polls its queues;
    then what everything uses while there is nothing to do.
    """
    from corogen.adapters.bench import machine
    from corogen.adapters.bench.callers import measure
    from corogen.adapters.bench.workload import story_prompts

    with guarded(output), _pipeline(engine, output, enable_prefix_caching=False) as pipe:
        result = measure(
            pipe,
            story_prompts(num_prompts),
            output_len=output_len,
            pairs=pairs,
            repeat=repeat,
            idle_s=idle_s,
            say=teller(output),
        )
        show_result("callers", {"model": engine.model, **result, "setting": machine.setting()}, output)


@bench.command()
@grouped
def steps(
    output: OutputOptions,
    streams: Annotated[int, typer.Option(help="Streams, each with a consumer on another loop.", min=1)] = 256,
    step_ms: Annotated[float, typer.Option(help="Scripted time of a step.", min=0.01)] = 4.0,
    output_len: OutputLen = 500,
    tokenizer: Annotated[Path | None, typer.Option(help="A folder with a tokenizer.json to decode with.")] = None,
    spin: Annotated[
        bool, typer.Option("--spin", help="With and without a spinning Python thread, at steps of 3, 5 and 8 ms.")
    ] = False,
    repeat: Annotated[int, typer.Option(help="Pairs of rounds at each step time, with --spin.", min=1)] = 3,
    switch_interval_ms: Annotated[
        float | None, typer.Option(help="sys.setswitchinterval, with --spin; Python's own is 5 ms.", min=0.01)
    ] = None,
) -> None:
    """The engine's own cost of a step.

    Scripted tokens in scripted time, and a consumer for each stream on another loop in another thread. With --spin
    the share of the rate that is left beside a thread of the application that never rests.
    """
    from corogen.adapters.bench import machine
    from corogen.adapters.bench import spin as spinning
    from corogen.adapters.bench.steps import measure

    with guarded(output):
        if spin:
            interval_s = None if switch_interval_ms is None else switch_interval_ms / 1e3
            found = spinning.measure(
                streams=streams, new_tokens=output_len, repeat=repeat, switch_interval_s=interval_s, say=teller(output)
            )
            show_result("spin", {**found, "setting": machine.setting()}, output)
            return
        cost = measure(streams=streams, step_time_s=step_ms / 1e3, new_tokens=output_len, tokenizer_folder=tokenizer)
        show_result("steps", {**cost.as_dict(), "setting": machine.setting()}, output)


@bench.command()
@grouped
def serve(
    engine: EngineOptions,
    load: LoadOptions,
    output: OutputOptions,
    compare_inprocess: Annotated[
        bool, typer.Option("--compare-inprocess", help="What HTTP costs: a server of our own against a pipeline here.")
    ] = False,
    repeat: Annotated[int, typer.Option(help="Pairs with --compare-inprocess.", min=1)] = 10,
) -> None:
    """Load on a server with OpenAI's API.

    Ours or another: TTFT, TPOT, ITL and whole times, tokens a second, goodput.
    """
    from corogen.adapters.bench import machine
    from corogen.adapters.cli.bench_serve import run_comparison, run_load

    with guarded(output), needing("serve"):
        if compare_inprocess:
            result = run_comparison(engine, output, load, pairs=repeat, say=teller(output))
            show_result("http", {**result, "setting": machine.setting()}, output)
        else:
            result = run_load(load)
            show_result("serve", {**result, "setting": machine.setting()}, output)
            if result["failed"] == result["requests"]:
                raise typer.Exit(1)


# ------------------------------------------------------------------ what they share


@contextlib.contextmanager
def _pipeline(engine: EngineOptions, output: OutputOptions, **config: Any) -> Iterator[Pipeline]:
    from corogen.adapters.cli.serving import open_pipeline

    pipe, _ = open_pipeline(engine.model, engine.config(**config), quiet=output.quiet)
    with pipe:
        yield pipe


def teller(output: OutputOptions) -> Any:
    """What takes lines about the progress."""
    return (lambda line: None) if output.quiet else say


def _measured(
    engine: EngineOptions,
    output: OutputOptions,
    count: int,
    input_len: int | None,
    file: Path | None,
    prefix_caching: bool,
    *,
    kind: str | None,
    **how: Any,
) -> dict[str, Any]:
    from corogen.adapters.bench import machine
    from corogen.adapters.bench.throughput import PeerRun, measure
    from corogen.workers.cpus import usable_cpus

    threads = engine.num_threads or usable_cpus()
    if kind is not None:
        _check_comparable(engine)
    with _pipeline(engine, output, enable_prefix_caching=prefix_caching) as pipe:
        peer = None if kind is None else PeerRun(_peer_folder(engine), kind, threads)
        prompts = _prompts(pipe, count, input_len, file)
        result = measure(pipe, prompts, peer=peer, say=teller(output), **how)
    setting = machine.setting(threads=threads, prefix_caching=prefix_caching)
    return {"model": engine.model, "input": _input_words(input_len, file), **result, "setting": setting}


def _in_shape_of(
    shape: str,
    engine: EngineOptions,
    output: OutputOptions,
    count: int,
    input_len: int | None,
    prefix_caching: bool,
    *,
    sampling: dict[str, Any],
    **how: Any,
) -> dict[str, Any]:
    from corogen.adapters.bench import machine
    from corogen.adapters.bench.random_model import make_folder
    from corogen.adapters.bench.shaped import measure_shaped

    with tempfile.TemporaryDirectory() as folder:
        engine = dataclasses.replace(engine, model=str(make_folder(shape, Path(folder))))
        config = {"enable_prefix_caching": prefix_caching, "random_weights": True}
        with _pipeline(engine, output, **config) as pipe:
            low, high = (input_len, input_len) if input_len is not None else (100, 1024)
            result = measure_shaped(
                pipe, Path(folder), count, (low, high), sampling=sampling, say=teller(output), **how
            )
    words = f"{low} to {high} random tokens"
    setting = machine.setting(prefix_caching=prefix_caching)
    return {"model": f"random weights like {shape}", "input": words, **result, "setting": setting}


def _prompts(pipe: Pipeline, count: int, input_len: int | None, file: Path | None) -> PromptSource:
    from corogen.adapters.bench import workload

    if input_len is not None and file is not None:
        raise typer.BadParameter("give --input-len or --prompts, not both")
    if file is not None:
        return functools.partial(workload.prompts_from, file, count)
    if input_len is not None:
        vocab_size = pipe.engine.admission.facts.vocab_size
        return lambda number: workload.random_prompts(count, input_len, vocab_size, seed=number)
    return functools.partial(workload.story_prompts, count)


def _input_words(input_len: int | None, file: Path | None) -> str:
    if file is not None:
        return f"prompts of {file}"
    return "chats of about 47 tokens" if input_len is None else f"{input_len} random tokens"


def _check_comparable(engine: EngineOptions) -> None:
    if engine.device_type == "cuda" or engine.dtype not in ("auto", "float32"):
        raise ConfigError("--compare transformers runs in float32 on the CPU: leave --device-type and --dtype out")


def _peer_folder(engine: EngineOptions) -> Path:
    """Where transformers finds the same model: the folder itself, or what a GGUF file was converted to."""
    from corogen.model.gguf import converted_folder
    from corogen.model.source import resolve_model

    path = resolve_model(engine.model, revision=engine.revision)
    return converted_folder(path) if path.suffix.lower() == ".gguf" else path


# ------------------------------------------------------------------ tables


def show_result(name: str, result: dict[str, Any], output: OutputOptions) -> None:
    """Print a result as tables or as JSON."""
    if output.json:
        import json

        print(json.dumps(_without_nan({"benchmark": name, **result})))
        return
    from corogen.adapters.cli.tables import show

    show(name, result)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is null."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
