"""The parent's end of `peer_child`: transformers, beside us but never at the same time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from corogen.errors import CorogenError

#: how transformers generates: a static batch, its continuous batching, or one request alone
KINDS = ("batch", "continuous", "one")

CHILD = Path(__file__).with_name("peer_child.py")


class PeerError(CorogenError):
    """The process that runs transformers failed; the message holds its traceback."""

    code = "peer_failed"


class PeerProcess:
    """A child process with transformers and the model. It sleeps in a read while nothing is asked.

    Args:
        folder: the model, as transformers loads it.
        threads: torch threads of the child.

    Raises:
        PeerError: the model can not be loaded.
    """

    def __init__(self, folder: Path | str, threads: int) -> None:
        self._stderr = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        try:
            self.versions: dict[str, str] = self._ask(load=str(folder), threads=threads)["versions"]
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def run(self, kind: str, prompts: list[Any], new: int) -> dict[str, Any]:
        """`seconds`, `tokens` and `ids` of generating `new` tokens for each prompt (messages, or token ids).

        Raises:
            PeerError: transformers raised, or the child died.
        """
        return self._ask(run=kind, prompts=prompts, new=new)

    def _ask(self, **request: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise PeerError("the process of transformers has no pipes")
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise PeerError(f"the process of transformers ended:\n{self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"transformers failed:\n{reply['error']}")
        return reply

    def _last_words(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-2000:].decode(errors="replace")

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what a dead child did not read
                    pipe.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
