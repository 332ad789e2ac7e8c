"""File descriptors that a process and its forked children share by accident."""

from __future__ import annotations

import os
import socket
import weakref

_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def fill_standard_streams() -> None:
    """Open /dev/null where descriptor 0, 1 or 2 is closed, as it is under some daemons.

    Otherwise a socket or a loop would get such a number: libuv refuses to close it, and a child's redirection would
    land on it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def close_in_forks(sock: socket.socket) -> None:
    """A forked child must not keep a worker's socket open: the worker waits for its end to know that we are gone."""
    _ours.add(sock)


def _let_go() -> None:
    sockets = [s for s in _ours if s.fileno() >= 0]
    if sockets:
        null = os.open(os.devnull, os.O_RDWR)
        for sock in sockets:
            os.dup2(null, sock.fileno())  # not closed: objects that the child inherits close the number once more
        os.close(null)


os.register_at_fork(after_in_child=_let_go)
