"""`corogen run`: one question, its answer on stdout while it is generated."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from corogen.adapters.cli.console import process_age, say
from corogen.adapters.cli.options import EngineOptions, OutputOptions, SamplingOptions
from corogen.adapters.cli.serving import open_pipeline
from corogen.outputs import Response

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline


def question_from(argument: str | None) -> str:
    """The question: the argument, or all of stdin when that is "-", or missing while stdin is no terminal.

    Raises:
        typer.BadParameter: there is neither, or it is empty or no text.
    """
    if argument is not None and argument != "-":
        if not argument.strip():
            raise typer.BadParameter("the question is empty", param_hint="QUESTION")
        return argument
    if sys.stdin is None or (argument is None and sys.stdin.isatty()):
        raise typer.BadParameter('give a question, or "-" to read it from stdin', param_hint="QUESTION")
    try:
        text = sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not {error.encoding} text: {error}", param_hint="QUESTION") from None
    if not text.strip():
        raise typer.BadParameter("stdin holds no question", param_hint="QUESTION")
    return text


def prompt_for(question: str, *, system: str | None, raw: bool) -> Any:
    """What the pipeline is given: raw text, one user message, or a chat that begins with a system message.

    Raises:
        typer.BadParameter: a system message without a chat template.
    """
    if raw and system is not None:
        raise typer.BadParameter("--raw sends the text alone: it can not be combined with --system")
    if system is None:
        return question
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def answer(prompt: Any, *, raw: bool, engine: EngineOptions, sampling: SamplingOptions, output: OutputOptions) -> None:
    """Load the model and answer one prompt."""
    pipe, phases = open_pipeline(
        engine.model, engine.config(max_batch_size=engine.max_batch_size or 1), quiet=output.quiet
    )
    with pipe:
        start = time.perf_counter()
        whole, first, age = _stream(pipe, prompt, raw=raw, sampling=sampling, show=not output.json)
        seconds = time.perf_counter() - start
    timing = {
        "first_token_s": first - start,
        "total_s": seconds,
        "process_to_first_token_s": age,
        "tok_per_s": whole.generate_token_len / seconds,
    }
    if output.json:
        print(json.dumps(_as_dict(whole, engine.model, timing, phases), ensure_ascii=False))
    if not output.quiet:
        say(timing_line(whole, timing))


def _stream(
    pipe: Pipeline, prompt: Any, *, raw: bool, sampling: SamplingOptions, show: bool
) -> tuple[Response, float, float]:
    whole, first, age = Response(), 0.0, 0.0
    write, flush = sys.stdout.write, sys.stdout.flush
    with pipe.stream_infer(prompt, gen_config=sampling.config(), do_preprocess=not raw) as pieces:
        for piece in pieces:
            if not first:
                first, age = time.perf_counter(), process_age()
            whole.extend(piece)
            if show:
                write(piece.text)
                flush()
    if show and not whole.text.endswith("\n"):
        write("\n")
        flush()
    return whole, first or time.perf_counter(), age


def timing_line(whole: Response, timing: dict[str, float]) -> str:
    """What stands below an answer."""
    return (
        f"{whole.generate_token_len} tokens ({whole.finish_reason}), first after {timing['first_token_s']:.2f} s "
        f"({timing['process_to_first_token_s']:.1f} s after the command was started), {timing['tok_per_s']:.1f} tok/s"
    )


def _as_dict(whole: Response, model: str, timing: dict[str, float], phases: dict[str, float]) -> dict[str, Any]:
    return {
        "model": model,
        "text": whole.text,
        "token_ids": whole.token_ids,
        "finish_reason": whole.finish_reason,
        "stop_reason": whole.stop_reason,
        "input_token_len": whole.input_token_len,
        "generate_token_len": whole.generate_token_len,
        "timing": timing,
        "startup_s": phases,
    }
