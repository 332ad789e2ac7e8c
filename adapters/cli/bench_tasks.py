"""`corogen bench tasks`."""

from __future__ import annotations

from typing import Annotated

import typer

from corogen.adapters.cli.bench import bench, show_result, teller
from corogen.adapters.cli.console import guarded
from corogen.adapters.cli.options import OutputOptions, grouped


@bench.command()
@grouped
def tasks(
    output: OutputOptions,
    layout: Annotated[list[str] | None, typer.Option(help="TPxPP, such as 2x2; may be repeated.")] = None,
    requests: Annotated[int, typer.Option(help="Requests, one after the other.", min=1)] = 1000,
    batches: Annotated[int, typer.Option(help="Batches, all submitted at once.", min=1)] = 5000,
    idle_s: Annotated[float, typer.Option(help="Seconds of the idle phase.", min=0)] = 5.0,
) -> None:
    """What launch_engine costs by itself.

    A model that adds one: times from submit to the result, batches a second, CPU use while idle.
    """
    from corogen.adapters.bench import machine
    from corogen.adapters.bench.tasks import LAYOUTS, measure

    with guarded(output):
        layouts = [_parsed(text) for text in layout] if layout else LAYOUTS
        result = measure(layouts, requests=requests, batches=batches, idle_s=idle_s, say=teller(output))
        show_result("tasks", {**result, "setting": machine.setting()}, output)


def _parsed(text: str) -> tuple[int, int]:
    tp, by, pp = text.partition("x")
    if not (by and tp.isdecimal() and pp.isdecimal()):
        raise typer.BadParameter(f"a layout is TPxPP, such as 2x1, not {text!r}")
    return int(tp), int(pp)
