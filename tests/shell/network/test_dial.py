"""Reasons for failed dials, from p2pd's words."""

from __future__ import annotations

import pytest

from pulsenet.ids import PeerId
from pulsenetd.network.dial import REMEMBERED_MAX, DialHistory, explain_dial, shorten

PEER = PeerId(bytes(range(32)))
ONE, TWO = "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/12"


def report(*lines: str) -> str:
    return "failed to dial: failed to dial 12D3KooW: all dials failed\n" + "\n".join(f"  * {line}" for line in lines)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (report(f"[{TWO}] dial backoff", f"[{ONE}] dial tcp4: connect: connection refused"), "refused"),
        (report(f"[{ONE}] failed to negotiate: peer id mismatch: expected A, but remote key matches B"), "wrong-peer"),
        (report(f"[{ONE}/p2p/12D3] dial tcp4: i/o timeout"), "timed-out"),
        ("timed out after 1 s: p2pd", "timed-out"),
        ("context deadline exceeded", "timed-out"),
        ("dial to self attempted", "self"),
        ("lookup x: no such host", "unresolved"),
        (report(f"[{ONE}] connect: no route to host"), "unreachable"),
        (report(f"[{ONE}] something new"), "unreachable"),
        (report(f"[{ONE}] dial backoff"), "backoff"),
    ],
)
def test_each_address_gets_its_own_reason(words: str, reason: str) -> None:
    assert explain_dial(ONE, words)[0] == reason


def test_an_address_in_back_off_keeps_the_reason_it_had() -> None:
    history = DialHistory()
    backoff = report(f"[{ONE}] dial backoff")
    assert history.explain(PEER, ONE, backoff).reason == "unreachable"
    assert history.explain(PEER, ONE, report(f"[{ONE}] connection refused")).reason == "refused"
    again = history.explain(PEER, ONE, backoff)
    assert again.reason == "refused"
    assert not again.is_connected
    assert str(again).endswith(": connection refused")
    history.forget(PEER, ONE)
    assert history.explain(PEER, ONE, backoff).reason == "unreachable"
    history.explain(PEER, ONE, report(f"[{ONE}] connection refused"))
    history.clear()
    assert history.explain(PEER, ONE, backoff).reason == "unreachable"


def test_the_newest_reasons_are_remembered_however_many_came_before() -> None:
    """p2pd lives for months, and keys come and go."""
    history = DialHistory()
    for index in range(REMEMBERED_MAX + 1):
        peer_id = PeerId(index.to_bytes(32, "big"))
        history.explain(peer_id, ONE, report(f"[{ONE}] connection refused"))
    backoff = report(f"[{ONE}] dial backoff")
    assert history.explain(peer_id, ONE, backoff).reason == "refused"
    assert history.explain(PeerId(bytes(32)), ONE, backoff).reason == "unreachable"
    history.explain(peer_id, ONE, report(f"[{ONE}] no route to host"))
    history.explain(PEER, ONE, report(f"[{ONE}] connection refused"))
    assert history.explain(PeerId((2).to_bytes(32, "big")), ONE, backoff).reason == "refused"
    assert history.explain(peer_id, ONE, backoff).detail == "no route to the host"


def test_long_reports_are_cut_to_one_line() -> None:
    assert shorten("a\n  b") == "a b"
    assert len(shorten("x" * 500)) == 203
