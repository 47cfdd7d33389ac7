"""Clients that leave: they are noticed while nothing is written to them, and only they."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rewarm.adapters.leaving import is_gone, watched

if sys.platform != "win32":
    import fcntl
    import resource

Pair = tuple[socket.socket, socket.socket]
_PAST_SELECT = 1100


@pytest.fixture(params=["low", "past 1023"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Our end of a connection and the client's; ours with a descriptor that `select.select` takes, or refuses."""
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        if request.param == "low":
            yield ours, theirs
            return
        if sys.platform == "win32":
            pytest.skip("descriptors are not counted from 0 on Windows")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _PAST_SELECT + 1), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _PAST_SELECT)
        yield stack.enter_context(socket.socket(fileno=high)), theirs


def test_a_client_that_leaves_is_told_once(pair: Pair) -> None:
    ours, theirs = pair
    left = threading.Event()
    with watched(ours, left.set):
        assert not left.is_set()
        theirs.close()
        assert left.wait(10)


def test_a_client_that_stays_or_asks_more_has_not_left(pair: Pair) -> None:
    ours, theirs = pair
    left = threading.Event()
    n_threads = threading.active_count()
    with watched(ours, left.set):
        theirs.sendall(b"GET / HTTP/1.1\r\n")
        time.sleep(0.05)
    with watched(ours, left.set):
        pass
    theirs.close()
    assert not left.is_set()
    assert threading.active_count() == n_threads
    assert ours.recv(16) == b"GET / HTTP/1.1\r\n"


def test_a_client_is_gone_when_its_side_is_closed(pair: Pair) -> None:
    ours, theirs = pair
    assert not is_gone(ours)
    theirs.sendall(b"G")
    assert not is_gone(ours)
    theirs.close()
    assert not is_gone(ours), "what it sent is still to be read"
    assert ours.recv(1) == b"G"
    assert is_gone(ours)
    ours.close()
    assert is_gone(ours)
