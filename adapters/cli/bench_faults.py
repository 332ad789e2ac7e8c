"""The part of `corogen bench` that looks for what is lost, stuck, different or left behind, and fails if it is."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corogen.adapters.cli.bench import show_result, teller
from corogen.adapters.cli.console import guarded
from corogen.adapters.cli.options import EngineOptions, OutputOptions, grouped

if TYPE_CHECKING:
    from corogen.adapters.bench.engines import Opener

faults = typer.Typer()

CancelRate = Annotated[float, typer.Option(help="Share of the requests whose caller leaves.", min=0, max=1)]
Seed = Annotated[int, typer.Option(help="The same seed: the same questions, callers and ways to leave.")]
Patience = Annotated[float, typer.Option(help="Seconds without any end after which what is open is stuck.", min=0.1)]
AtOnce = Annotated[int, typer.Option(help="Requests under way at the same time.", min=1)]
OutputLen = Annotated[int, typer.Option(help="New tokens of the longest answer.", min=2)]


@dataclass(frozen=True)
class ScriptedOptions(EngineOptions):
    """The same for measurements that need no model."""

    model: Annotated[
        str,
        typer.Option("--model", "-m", help='A model, or "scripted": answers without one, a token each millisecond.'),
    ] = "scripted"


@faults.command()
@grouped
def chaos(
    engine: EngineOptions,
    output: OutputOptions,
    requests: Annotated[int, typer.Option(help="Requests.", min=1)] = 500,
    kill_every: Annotated[float, typer.Option(help="Seconds from ready workers to their end.", min=0.001)] = 2.0,
    cancel_rate: CancelRate = 0.3,
    at_once: AtOnce = 8,
    output_len: OutputLen = 24,
    patience_s: Patience = 300.0,
    seed: Seed = 0,
) -> None:
    """Workers that are killed.

    Coroutines, threads, futures and queues ask; some leave at random points; the workers are killed with SIGKILL.
    Every answer is compared with the one that comes without faults. The exit code is 1 if anything is lost, stuck,
    different or left behind.
    """
    from corogen.adapters.bench.chaos import Settings, measure

    with guarded(output):
        settings = Settings(requests, kill_every, cancel_rate, at_once, output_len, patience_s, seed)
        _finish("chaos", engine, output, measure(_opener(engine), settings, say=teller(output)))


@faults.command()
@grouped
def cancel(
    engine: ScriptedOptions,
    output: OutputOptions,
    requests: Annotated[int, typer.Option(help="Requests that are cancelled.", min=1)] = 10_000,
    at_once: AtOnce = 32,
    output_len: OutputLen = 64,
    leave_within_s: Annotated[float, typer.Option(help="Callers by the clock leave within this time.", min=0)] = 0.05,
    patience_s: Patience = 120.0,
    seed: Seed = 0,
) -> None:
    """Requests that are cancelled.

    At random points, by callers of every kind; memory and blocks are watched. The exit code is 1 if anything is lost,
    stuck, different or left behind, or if memory grows.
    """
    from corogen.adapters.bench.cancel import Settings, measure

    with guarded(output):
        settings = Settings(requests, at_once, output_len, leave_within_s, patience_s, seed)
        _finish("cancel", engine, output, measure(_opener(engine), settings, say=teller(output)))


@faults.command()
@grouped
def soak(
    engine: ScriptedOptions,
    output: OutputOptions,
    minutes: Annotated[float, typer.Option(help="How long.", min=0.001)] = 30.0,
    kill_every: Annotated[float, typer.Option(help="Seconds from ready workers to their end.", min=0.001)] = 5.0,
    cancel_rate: CancelRate = 0.3,
    at_once: AtOnce = 8,
    output_len: OutputLen = 24,
    patience_s: Patience = 300.0,
    seed: Seed = 0,
) -> None:
    """Both for a long time.

    Mixed callers, cancellations and faults; a line of figures from time to time. The exit code is 1 if anything is
    lost, stuck, different or left behind, or if memory grows.
    """
    from corogen.adapters.bench.soak import Settings, measure

    with guarded(output):
        settings = Settings(minutes, kill_every, cancel_rate, at_once, output_len, patience_s, seed)
        _finish("soak", engine, output, measure(_opener(engine), settings, say=teller(output)))


@faults.command()
@grouped
def cycles(
    engine: EngineOptions,
    output: OutputOptions,
    count: Annotated[int, typer.Option(help="How often.", min=2)] = 10,
) -> None:
    """Open, ask, close, again.

    Shows threads, children, descriptors and memory after each. The exit code is 1 if anything is left.
    """
    from corogen.adapters.bench.cycles import measure

    with guarded(output):
        _finish("cycles", engine, output, measure(_opener(engine), count, say=teller(output)))


def _opener(engine: EngineOptions) -> Opener:
    from corogen.adapters.bench import engines

    if engine.model == engines.SCRIPTED:
        return functools.partial(engines.scripted, engine.config())
    return functools.partial(engines.real, engine.model, engine.config())


def _finish(name: str, engine: EngineOptions, output: OutputOptions, result: dict[str, Any]) -> None:
    """Show the result; raise the exit code 1 if there are problems."""
    from corogen.adapters.bench import machine

    show_result(name, {"model": engine.model, **result, "setting": machine.setting()}, output)
    if result["problems"]:
        raise typer.Exit(1)
