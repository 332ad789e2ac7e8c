"""`corogen chat`: a conversation, line by line."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING

from corogen.adapters.cli.console import needing, say
from corogen.adapters.cli.options import EngineOptions, OutputOptions, SamplingOptions
from corogen.adapters.cli.serving import open_pipeline
from corogen.errors import InvalidRequest
from corogen.params import GenerationConfig

if TYPE_CHECKING:
    from corogen.adapters.cli.remote import RemotePipeline
    from corogen.adapters.pipeline import Pipeline

HELP = """\
/help          this list
/system TEXT   begin anew with a system message; without TEXT, without one
/reset         begin anew
/exit          leave (Ctrl-D does, too)
Ctrl-C stops an answer; at the prompt it leaves."""


class Conversation:
    """A session of the pipeline, and what is typed into it."""

    def __init__(
        self, pipe: Pipeline | RemotePipeline, gen_config: GenerationConfig, system: str | None = None
    ) -> None:
        self._pipe, self._gen_config = pipe, gen_config
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget what was said and begin with this system message, if there is one."""
        self._system = system
        self._session = self._pipe.session([] if system is None else [{"role": "system", "content": system}])

    def say(self, text: str) -> None:
        """Answer one user message on stdout. What was shown stays in the conversation, also when it was stopped.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the request is aborted.
            InvalidRequest: the conversation has become too long, for one.
        """
        session, shown = self._session, ""
        before = list(session.history)
        try:
            with self._pipe.chat(text, session, self._gen_config, stream_response=True) as pieces:
                for piece in pieces:
                    shown += piece.text
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if shown:  # the session itself keeps complete answers only
                turn = [{"role": "user", "content": text}, {"role": "assistant", "content": shown}]
                session.history = [*before, *turn]
            raise
        finally:
            if shown:
                sys.stdout.write("\n")
                sys.stdout.flush()

    def command(self, line: str) -> bool:
        """Obey a line that begins with "/"; False if it asks to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self.begin(self._system)
        elif name == "/system":
            self.begin(rest.strip() or None)
        elif name == "/help":
            say(HELP)
        else:
            say(f"there is no command {name}; /help lists them")
        return True


def talk(
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    system: str | None,
    server: tuple[str, str | None] | None = None,
) -> None:
    """Load the model and talk until stdin ends, /exit, or Ctrl-C at the prompt. `server`: its address and key."""
    with _pipeline(engine, output) if server is None else _remote(*server) as pipe:
        conversation = Conversation(pipe, sampling.config(), system)
        interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # line editing and history
            say("Ctrl-D leaves, /help lists commands.")
        try:
            _loop(conversation, interactive)
        except KeyboardInterrupt:
            say("")
            raise


def _pipeline(engine: EngineOptions, output: OutputOptions) -> Pipeline:
    config = engine.config(max_batch_size=engine.max_batch_size or 1)
    pipe, _ = open_pipeline(engine.model, config, quiet=output.quiet)
    return pipe


def _remote(url: str, api_key: str | None) -> RemotePipeline:
    with needing("serve"):
        from corogen.adapters.cli.remote import RemotePipeline
    return RemotePipeline(url, api_key)


def _loop(conversation: Conversation, interactive: bool) -> None:
    while (line := _next_line(interactive)) is not None:
        text = line.strip()
        if text.startswith("/"):
            if not conversation.command(text):
                return
        elif text:
            _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    try:
        conversation.say(text)
    except KeyboardInterrupt:
        say("(stopped)")
    except InvalidRequest as error:
        say(f"corogen: {error}")


def _next_line(interactive: bool) -> str | None:
    """The next line of stdin; None at its end."""
    if not interactive:
        return sys.stdin.readline() or None
    try:
        return input("> ")
    except EOFError:
        say("")
        return None
