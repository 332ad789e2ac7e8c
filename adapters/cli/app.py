"""The commands and their options; what they do stands in the modules beside this one, imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corogen.adapters.cli.bench import bench
from corogen.adapters.cli.bench_faults import faults
from corogen.adapters.cli.bench_tasks import tasks  # noqa: F401 (adds itself to `bench`)
from corogen.adapters.cli.console import guarded
from corogen.adapters.cli.options import EngineOptions, OutputOptions, SamplingOptions, grouped
from corogen.adapters.cli.serve import ServerOptions

app = typer.Typer(
    name="corogen",
    help="Serves transformer models: ask, chat, serve, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench.add_typer(faults)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"corogen {importlib.metadata.version('corogen')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serves transformer models: ask, chat, serve, measure."""


@app.command()
@grouped
def run(
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    question: Annotated[str | None, typer.Argument(help='The question; "-" or nothing reads it from stdin.')] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
) -> None:
    """Answer one question.

    The answer goes to stdout while it is generated.
    """
    from corogen.adapters.cli.run import answer, prompt_for, question_from

    with guarded(output):
        prompt = prompt_for(question_from(question), system=system, raw=raw)
        answer(prompt, raw=raw, engine=engine, sampling=sampling, output=output)


@app.command()
@grouped
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    url: Annotated[str | None, typer.Option(help="Ask this server instead of loading a model.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = None,
) -> None:
    """Talk to a model.

    /help lists what else can be typed; Ctrl-C stops an answer, Ctrl-D leaves.
    """
    from corogen.adapters.cli.chat import talk

    with guarded(output):
        talk(
            engine=engine,
            sampling=sampling,
            output=output,
            system=system,
            server=None if url is None else (url, api_key),
        )


@app.command()
@grouped
def serve(
    engine: EngineOptions,
    server: ServerOptions,
    output: OutputOptions,
    model_name: Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Ctrl-C or SIGTERM lets running requests finish; a second Ctrl-C ends them.
    """
    from corogen.adapters.cli.serve import serve as run_server

    with guarded(output):
        run_server(model_name or engine.model, engine=engine, server=server, output=output)


@app.command()
@grouped
def batch(
    engine: EngineOptions,
    output: OutputOptions,
    source: Annotated[Path, typer.Argument(help="Requests: OpenAI's batch format, one JSON object a line.")],
    target: Annotated[Path, typer.Argument(help="Answers; what it holds already is not asked again.")],
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Names of the model in the requests; may be repeated.")
    ] = None,
    at_once: Annotated[int, typer.Option(help="Requests that are under way at a time.", min=1)] = 256,
) -> None:
    """Answer a file of requests.

    Stopped, it goes on where it was. Exit code 1 if a request failed.
    """
    from corogen.adapters.cli.batch import answer_all

    with guarded(output):
        failed = answer_all(
            source, target, engine=engine, output=output, names=served_model_name or [], at_once=at_once
        )
        if failed:
            raise SystemExit(1)


@app.command()
@grouped
def check_env(output: OutputOptions) -> None:
    """Show versions, machine and model cache."""
    import json

    from corogen.adapters.cli.env import facts, show

    with guarded(output):
        found = facts()
        print(json.dumps(found, indent=2)) if output.json else show(found)
