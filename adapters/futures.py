"""Requests as `concurrent.futures` futures."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError
from typing import Any

from corogen.adapters.calls import Batch, Call
from corogen.adapters.loop_thread import EngineThread
from corogen.outputs import Response


class RequestFuture(Future[Any]):
    """A `concurrent.futures.Future` of one `Response`, or of a list of them when a list of prompts was submitted.

    `cancel()` ends the request, also when it runs already. Callbacks run in the engine's thread: they must be short,
    and a blocking call in one is refused. The future keeps its engine alive until it is done.
    """

    def __init__(self, thread: EngineThread, call: Call) -> None:
        super().__init__()
        self._thread: EngineThread | None = thread
        self._single = call.single
        self._answers: list[Response | None] = [None] * len(call.prompts)
        self._arrival = threading.Lock()
        self._cancelling = threading.Lock()
        self._batch = Batch(thread.engine, call, thread.portals.direct, self._arrived, pieces=False)
        self._batch.submit(self._arrived)
        if not call.prompts:
            self._settle(None)

    @property
    def request_ids(self) -> list[str]:
        """Ids for `Pipeline.abort`."""
        return self._batch.request_ids

    def cancel(self) -> bool:
        """End the request; False if it is done already."""
        if not self._cancelling.acquire(blocking=False):
            return self.cancelled()
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()  # waiters in wait() and as_completed() hear of it
        self._batch.abort()
        self._thread = None
        return True

    def running(self) -> bool:
        """Whether the request is under way, waiting for its turn included."""
        return not self.done()

    def _arrived(self, item: Any) -> None:
        """Engine's thread, or the submitting one for an item that was refused."""
        error: BaseException | None = None
        with self._arrival:
            if not self._batch.open:
                return
            try:
                answer = self._batch.receive(item)
                if answer is not None:
                    self._answers[answer.index] = answer
            except Exception as failure:
                error = failure
            if self._batch.open:
                return
        self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        self._thread = None
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(self._answers[0] if self._single else self._answers)
