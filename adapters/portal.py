"""Consumer contexts: an asyncio or uvloop loop, a trio run, the engine's own loop, or a thread that blocks.

News travel from the engine's thread into a context by one post per context and step (see `corogen.stream`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from corogen.errors import InvalidRequest
from corogen.stream import Outlet, Signal, two_readers

if TYPE_CHECKING:
    import trio

#: runs a function with one argument in a consumer's context
Post = Callable[[Callable[[Any], Any], Any], None]
#: makes the outlet of a consumer context out of the way into it; None: readers are woken where they are
MakeOutlet = Callable[[Post | None], Outlet]


def inert_outlet(post: Post | None) -> Outlet:
    """For a service whose readers only wait for futures."""
    return Outlet(lambda outlet: None, post)


class Waiter(Protocol):
    """Lets one coroutine sleep until there is news."""

    def set(self) -> None:
        """Wake it; called in the consumer's context."""

    async def wait(self) -> None:
        """Sleep until the next `set`. Raises InvalidRequest in another context, or when somebody waits already."""


class Mailbox:
    """What has arrived for one reader. Used in the reader's context only."""

    __slots__ = ("items", "signal")

    def __init__(self, signal: Waiter) -> None:
        self.signal = signal
        self.items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add an item and wake the reader."""
        self.items.append(item)
        self.signal.set()


class Portal(Protocol):
    """The way into one consumer context."""

    outlet: Outlet

    def post(self, function: Callable[[Any], Any], argument: Any) -> None:
        """Run `function(argument)` there. From any thread. Raises RuntimeError when the context is over."""

    def mailbox(self) -> Mailbox:
        """A mailbox for a reader there; called there."""


class LoopSignal(Signal):
    """A signal that refuses to be awaited on another loop, where nobody would wake it."""

    __slots__ = ("_home",)

    def __init__(self) -> None:
        super().__init__()
        self._home = asyncio.get_running_loop()

    async def wait(self) -> None:
        """Sleep until the next `set`."""
        home = self._home
        if _running_loop() is not home:
            raise _elsewhere()
        if self._waiter is not None:
            raise two_readers()
        self._waiter = waiter = home.create_future()  # not super().wait(): once a piece, a coroutine counts
        try:
            await waiter
        finally:
            self._waiter = None


class LoopPortal:
    """The way into an asyncio or uvloop loop. Holds the loop weakly; streams keep it alive."""

    def __init__(self, loop: asyncio.AbstractEventLoop, make_outlet: MakeOutlet) -> None:
        self._loop = weakref.ref(loop)
        self.outlet = make_outlet(self.post)

    def post(self, function: Callable[[Any], Any], argument: Any) -> None:
        """Run `function(argument)` on the loop."""
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        loop.call_soon_threadsafe(function, argument)

    def mailbox(self) -> Mailbox:
        """A mailbox for a task of this loop."""
        return Mailbox(LoopSignal())


class OwnLoopPortal(LoopPortal):
    """The engine's own loop: its tasks are woken directly, without a detour through the loop's queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, direct: Outlet) -> None:
        super().__init__(loop, lambda post: direct)


class TrioSignal:
    """The same for trio."""

    __slots__ = ("_event", "_home")

    def __init__(self, home: trio.lowlevel.TrioToken) -> None:
        self._home = home
        self._event: trio.Event | None = None

    def set(self) -> None:
        """Wake the waiter, if there is one."""
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Sleep until the next `set`."""
        import trio

        if not trio.lowlevel.in_trio_task() or trio.lowlevel.current_trio_token() is not self._home:
            raise _elsewhere()
        if self._event is not None:
            raise two_readers()
        self._event = trio.Event()
        try:
            await self._event.wait()
        finally:
            self._event = None


class TrioPortal:
    """The way into a trio run."""

    def __init__(self, token: trio.lowlevel.TrioToken, make_outlet: MakeOutlet) -> None:
        self._token = weakref.ref(token)
        self.outlet = make_outlet(self.post)

    def post(self, function: Callable[[Any], Any], argument: Any) -> None:
        """Run `function(argument)` in the run. RunFinishedError is a RuntimeError."""
        token = self._token()
        if token is None:
            raise RuntimeError("the trio run is over")
        token.run_sync_soon(function, argument)

    def mailbox(self) -> Mailbox:
        """A mailbox for a task of this run."""
        import trio

        return Mailbox(TrioSignal(trio.lowlevel.current_trio_token()))


class Portals:
    """All consumer contexts of one engine; one portal each, kept as long as the context lives.

    Args:
        loop: the engine's own.
        make_outlet: makes the outlet of each context.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, make_outlet: MakeOutlet) -> None:
        self._make_outlet = make_outlet
        self._lock = threading.Lock()
        #: for readers that are woken from the engine's thread: threads with a queue, and tasks of the engine's own loop
        self.direct = make_outlet(None)
        own: Portal = OwnLoopPortal(loop, self.direct)
        self._portals: weakref.WeakKeyDictionary[object, Portal] = weakref.WeakKeyDictionary()
        self._portals[loop] = own

    def current(self) -> Portal:
        """The portal of the coroutine that calls.

        Raises:
            InvalidRequest: there is no running asyncio or trio loop in this thread.
        """
        token = _trio_token()
        home = _running_loop() if token is None else token
        if home is None:
            raise InvalidRequest(
                "there is no running asyncio or trio event loop in this thread: in synchronous code use infer, "
                "stream_infer or submit"
            )
        with self._lock:
            portal = self._portals.get(home)
            if portal is None:
                make: Callable[[Any, MakeOutlet], Portal] = LoopPortal if token is None else TrioPortal
                portal = self._portals[home] = make(home, self._make_outlet)
            return portal


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _trio_token() -> trio.lowlevel.TrioToken | None:
    """Of the trio task that runs in this thread. Asked first, since a trio run may be a guest of an asyncio loop."""
    lowlevel = sys.modules.get("trio.lowlevel")
    if lowlevel is None or not lowlevel.in_trio_task():
        return None
    token: trio.lowlevel.TrioToken = lowlevel.current_trio_token()
    return token


def _elsewhere() -> InvalidRequest:
    return InvalidRequest("this stream belongs to another event loop: read it where it was made")


async def settled(portal: Portal, future: Future[Any]) -> None:
    """Sleep until `future`, of whatever thread, is done; for a coroutine of any loop."""
    box = portal.mailbox()

    def tell(done: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the coroutine's loop is closed
            portal.post(box.put, done)

    future.add_done_callback(tell)
    while not box.items:
        await box.signal.wait()
