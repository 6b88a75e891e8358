"""Bytes of a client have their time, and hosts that are this machine are known."""

from __future__ import annotations

import io
import socket

import pytest

from pulsenetd.engines.openai_clients import Incoming, is_loopback_host


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


@pytest.mark.parametrize(
    "text", ["localhost", "localhost:80", "127.0.0.1:8001", "127.8.8.8", "[::1]", "[::1]:80", "::1"]
)
def test_this_machine_is_known(text: str) -> None:
    assert is_loopback_host(text)


@pytest.mark.parametrize(
    "text",
    ["", "page.example", "localhost.page.example:80", "10.0.0.1", "[::1", "127.0.0.1.page.example", "a@b"],
)
def test_other_hosts_are_not(text: str) -> None:
    assert not is_loopback_host(text)
