"""A worker process: `python -P -m corogen.workers FD`. Receives and launches here, replies from a second thread."""

from __future__ import annotations

import queue
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from corogen.errors import CorogenError
from corogen.wire.channel import BlockingChannel
from corogen.wire.messages import (
    StartPhase,
    StepError,
    StepInput,
    StepOutput,
    StepSkipped,
    WorkerFailed,
    WorkerSpec,
)

if TYPE_CHECKING:
    from corogen.workers.pending import PendingTokens
    from corogen.workers.runner import Runner

Reply = tuple[StepInput, "PendingTokens | Exception | None"]


def main() -> None:
    """Serve the socket whose descriptor is the first argument until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; only the parent decides
    channel = BlockingChannel(socket.socket(fileno=int(sys.argv[1])))
    spec = channel.receive()
    if isinstance(spec, WorkerSpec):
        _extend_path(spec.sys_path)
        runner = _load(spec, channel)
        if runner is not None:
            _serve(runner, channel)


def _extend_path(parent_path: list[str]) -> None:
    """What the parent can import we can too; behind our own entries, so that nothing there shadows a module."""
    sys.path += [entry for entry in parent_path if entry and entry not in sys.path]


def _load(spec: WorkerSpec, channel: BlockingChannel) -> Runner | None:
    phase = "import"

    def report(entered: StartPhase) -> None:
        nonlocal phase
        phase = entered.name
        channel.send(entered)

    try:
        report(StartPhase("import"))
        from corogen.workers.runner import Runner

        runner = Runner(spec, report)
        channel.send(runner.load())
        return runner
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, CorogenError) else ""
        channel.send(WorkerFailed(phase, kind, str(error), traceback.format_exc()))
        return None


def _serve(runner: Runner, channel: BlockingChannel) -> None:
    """Launch steps as they come. The reply thread waits for ids, so the next step is queued on the device meanwhile."""
    replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
    failed_epochs: set[int] = set()
    replier = threading.Thread(target=_reply, args=(replies, channel, failed_epochs), name="reply", daemon=True)
    replier.start()
    while isinstance(message := channel.receive(), StepInput):
        if message.epoch in failed_epochs:
            replies.put((message, None))
            continue
        try:
            replies.put((message, runner.launch(message)))
        except Exception as error:
            failed_epochs.add(message.epoch)
            replies.put((message, error))
    replies.put(None)
    replier.join()


def _reply(replies: queue.SimpleQueue[Reply | None], channel: BlockingChannel, failed_epochs: set[int]) -> None:
    while (item := replies.get()) is not None:
        step, outcome = item
        try:
            channel.send(_answer(step, outcome, failed_epochs))
        except OSError:
            return  # the parent is gone; the receiving thread sees it too


def _answer(
    step: StepInput, outcome: PendingTokens | Exception | None, failed_epochs: set[int]
) -> StepOutput | StepError | StepSkipped:
    if isinstance(outcome, Exception):
        return _error(step, outcome)
    if outcome is None or step.epoch in failed_epochs:
        return StepSkipped(step.step, step.epoch)
    try:
        return StepOutput(step.step, step.epoch, outcome.wait())
    except Exception as error:
        failed_epochs.add(step.epoch)
        return _error(step, error)


def _error(step: StepInput, error: Exception) -> StepError:
    trace = "".join(traceback.format_exception(error))
    return StepError(step.step, step.epoch, trace, type(error).__name__)


if __name__ == "__main__":
    main()
