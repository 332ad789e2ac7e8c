"""A pipeline that answers from a script, and a way to run commands against it."""

from typer.testing import CliRunner

from corogen.adapters.cli import serving
from corogen.adapters.cli.app import app
from corogen.adapters.session import ChatStream, Session
from corogen.outputs import Response


class ScriptedStream:
    """Pieces, or an exception in place of one; notes whether it was left."""

    def __init__(self, pieces):
        self.pieces, self.left = iter(pieces), False

    def __iter__(self):
        return self

    def __next__(self):
        piece = next(self.pieces)
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        self.left = True


def pieces(*texts, reason="stop"):
    """The pieces of an answer, one token each."""
    last = len(texts)
    return [Response(text, i, 7, reason if i == last else None, [100 + i]) for i, text in enumerate(texts, start=1)]


class ScriptedPipeline:
    """Answers the n-th prompt with the n-th script; the last one serves for all that follow."""

    def __init__(self, *answers):
        self.answers = list(answers) or [pieces("Pa", "ris")]
        self.asked, self.streams, self.closed, self.opened_with = [], [], 0, None

    def stream_infer(self, prompt, gen_config=None, do_preprocess=True):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        self.asked.append((prompt, gen_config, do_preprocess))
        self.streams.append(ScriptedStream(answer))
        return self.streams[-1]

    session = staticmethod(Session)

    def chat(self, prompt, session, gen_config, *, stream_response):
        messages = session.ask(prompt)
        try:
            stream = self.stream_infer(messages, gen_config)
        except BaseException:
            session.done(messages, None)
            raise
        return ChatStream(session, messages, stream)

    def async_stream_infer(self, prompt, gen_config=None, do_preprocess=True):
        return self.stream_infer(prompt, gen_config, do_preprocess)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.closed += 1


def use(monkeypatch, pipe):
    """Let every command that asks for a pipeline get this one."""

    def open_scripted(model, config, *, quiet=False):
        pipe.opened_with = model, config
        return pipe, {"load": 0.5}

    for module in ("run", "chat", "serving"):
        target = __import__(f"corogen.adapters.cli.{module}", fromlist=["open_pipeline"])
        monkeypatch.setattr(target, "open_pipeline", open_scripted)
    assert serving.open_pipeline is open_scripted
    return pipe


def corogen(*arguments, stdin=None):
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, prog_name="corogen")
