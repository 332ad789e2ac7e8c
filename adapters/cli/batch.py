"""`corogen batch`: a file of requests into a file of answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from corogen.adapters.cli.console import needing, say
from corogen.adapters.cli.options import EngineOptions, OutputOptions
from corogen.adapters.cli.serve import public_name
from corogen.adapters.cli.serving import open_pipeline


def answer_all(
    source: Path, target: Path, *, engine: EngineOptions, output: OutputOptions, names: list[str], at_once: int
) -> int:
    """Answer everything; the number of requests that failed.

    Raises:
        ConfigError: one of the files is not what it should be.
    """
    import uvloop

    with needing("serve"):
        from corogen.adapters.batch_file import answer_file, requests_in
        from corogen.adapters.server import ServerSettings, make_app
    total = sum(1 for _ in requests_in(source, set()))
    pipe, _ = open_pipeline(engine.model, engine.config(), quiet=output.quiet)
    with pipe, _bar(total, shown=not output.quiet) as on_answer:
        settings = ServerSettings(served_model_names=tuple(names or [public_name(engine.model)]))
        app = make_app(pipe, settings)
        done, failed = uvloop.run(answer_file(app, source, target, at_once=at_once, on_answer=on_answer))
    if not output.quiet:
        say(f"{done} answered, {failed} failed, {total - done - failed} were answered before: {target}")
    return failed


@contextlib.contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[bool], None]]:
    if not shown:
        yield lambda succeeded: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda succeeded: progress.advance(task)
