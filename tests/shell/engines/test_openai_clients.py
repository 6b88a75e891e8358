"""Bytes of a client have their time, and all clients their share of the memory."""

from __future__ import annotations

import io
import socket

import pytest

from pulsenetd.engines.openai_clients import Incoming, MemoryBudget


def test_bytes_that_keep_coming_end_when_their_time_is_over() -> None:
    now = 10.0
    ours, theirs = socket.socketpair()
    with ours, theirs:
        incoming = Incoming(ours, 30.0, lambda: now)
        reader = io.BufferedReader(incoming)
        incoming.give_up_at = 12.0
        theirs.sendall(b"GET ")
        assert reader.read1(4) == b"GET "
        assert ours.gettimeout() == 30.0, "what is sent has its own time"
        now = 12.0
        theirs.sendall(b"/")
        with pytest.raises(TimeoutError):
            reader.read1(1)
        incoming.give_up_at = float("inf")
        assert reader.read1(1) == b"/"


def test_what_requests_hold_together_is_bounded() -> None:
    budget = MemoryBudget(10)
    assert budget.take(7)
    assert not budget.take(4)
    assert budget.take(3)
    assert budget.left_bytes == 0
    budget.give_back(7)
    assert budget.take(4)
