"""A worker process: `python -P -m corogen.workers FD`. Receives and launches here, replies from a second thread."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from corogen.errors import CorogenError
from corogen.wire.channel import BlockingChannel
from corogen.wire.messages import (
    StartPhase,
    StepError,
    StepInput,
    StepOutput,
    StepSkipped,
    TaskInput,
    TaskSpec,
    WorkerFailed,
    WorkerSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from corogen.tasks.runner import TaskRunner
    from corogen.workers.pending import PendingTokens
    from corogen.workers.runner import Runner

Reply = tuple[StepInput, "PendingTokens | Exception | None"]


def main() -> None:
    """Serve the socket whose descriptor is the first argument until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; only the parent decides
    channel = BlockingChannel(socket.socket(fileno=int(sys.argv[1])))
    spec = channel.receive()
    if isinstance(spec, WorkerSpec | TaskSpec):
        _extend_path(spec.sys_path)
        runner = _load(spec, channel)
        if runner is not None:
            _serve_tasks(runner, channel) if isinstance(spec, TaskSpec) else _serve(runner, channel)


def _extend_path(parent_path: list[str]) -> None:
    """What the parent can import we can too; behind our own entries, so that nothing there shadows a module."""
    sys.path += [entry for entry in parent_path if entry and entry not in sys.path]


def _load(spec: WorkerSpec | TaskSpec, channel: BlockingChannel) -> Any:
    """The runner that `spec` asks for, ready; None if it could not be made, which is reported."""
    phase = "import"

    def report(entered: StartPhase) -> None:
        nonlocal phase
        phase = entered.name
        channel.send(entered)

    try:
        report(StartPhase("import"))
        runner = _make_runner(spec, report)
        channel.send(runner.load())
        return runner
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, CorogenError) else ""
        channel.send(WorkerFailed(phase, kind, str(error), traceback.format_exc()))
        return None


def _make_runner(spec: WorkerSpec | TaskSpec, report: Callable[[StartPhase], None]) -> Any:
    if isinstance(spec, TaskSpec):
        from corogen.tasks.runner import TaskRunner

        return TaskRunner(spec, report)
    from corogen.workers.runner import Runner

    return Runner(spec, report)


def _serve_tasks(runner: TaskRunner, channel: BlockingChannel) -> None:
    """One batch behind the other, for as long as each may take; another thread receives."""
    inputs: queue.SimpleQueue[TaskInput | None] = queue.SimpleQueue()
    threading.Thread(target=_receive_tasks, args=(channel, inputs), name="receive", daemon=True).start()
    while (task := inputs.get()) is not None:
        channel.send(runner.run(task))


def _receive_tasks(channel: BlockingChannel, inputs: queue.SimpleQueue[TaskInput | None]) -> None:
    while isinstance(message := channel.receive(), TaskInput):
        inputs.put(message)
    if message is None:
        os._exit(1)  # the parent is gone, and no one wants what is being computed
    inputs.put(None)


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
