"""Why an address could not be dialled, in words for people and codes for programs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pulsenet.ids import PeerId
from pulsenetd.network import addresses


@dataclass(frozen=True, slots=True)
class DialOutcome:
    """What came of dialling one address."""

    peer_id: PeerId
    address: str
    reason: str
    """``connected``, ``refused``, ``timed-out``, ``wrong-peer``, ``unresolved``, ``self``, ``invalid`` or
    ``unreachable``."""
    detail: str
    is_old: bool = False
    """Whether libp2p did not dial at all this time, so that the reason is the one of an earlier dial."""

    @property
    def is_connected(self) -> bool:
        """Whether the peer was reached."""
        return self.reason == "connected"

    def __str__(self) -> str:
        return f"{addresses.join_address(self.address, self.peer_id)}: {self.detail}"


class DialHistory:
    """Remembers why addresses failed, because libp2p soon only says that it will not dial again yet."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[PeerId, str], tuple[str, str]] = {}

    def explain(self, peer_id: PeerId, address: str, text: str) -> DialOutcome:
        """Return the outcome for one address from p2pd's report on a failed dial."""
        reason, detail = explain_dial(address, text)
        is_old = reason == "backoff"
        if is_old:
            reason, detail = self._reasons.get((peer_id, address), ("unreachable", detail))
        else:
            self.forget(peer_id, address)
            self._reasons[peer_id, address] = (reason, detail)
            if len(self._reasons) > REMEMBERED_MAX:
                del self._reasons[next(iter(self._reasons))]
        return DialOutcome(peer_id, address, reason, detail, is_old)

    def forget(self, peer_id: PeerId, address: str) -> None:
        """Drop what is known of an address."""
        self._reasons.pop((peer_id, address), None)

    def clear(self) -> None:
        """Drop everything: a new p2pd dials afresh."""
        self._reasons.clear()


REMEMBERED_MAX: Final = 4_096
"""Addresses; the one that failed longest ago is forgotten beyond."""

_DIAL_REASONS: Final = (
    ("dial backoff", "backoff", "dialled too often"),
    ("connection refused", "refused", "connection refused"),
    ("peer id mismatch", "wrong-peer", "another peer answers there"),
    ("dial to self attempted", "self", "this is our own key"),
    ("no such host", "unresolved", "the name does not resolve"),
    ("timed out", "timed-out", "no answer"),
    ("timeout", "timed-out", "no answer"),
    ("deadline exceeded", "timed-out", "no answer"),
    ("no route to host", "unreachable", "no route to the host"),
    ("network is unreachable", "unreachable", "the network is unreachable"),
)
"""p2pd's words, our stable reason, and what to tell people."""


def explain_dial(address: str, text: str) -> tuple[str, str]:
    """Return the reason code and a short text why one address failed, from p2pd's report on all of them."""
    own_line = re.search(r"\[" + re.escape(address) + r"(?:/[^\]]*)?\] (.*)", text)
    words = own_line.group(1) if own_line else text
    for needle, reason, detail in _DIAL_REASONS:
        if needle in words:
            remote = re.search(r"remote key matches (\w+)", words)
            return reason, f"{detail} ({remote.group(1)})" if remote and reason == "wrong-peer" else detail
    return "unreachable", shorten(words)


def shorten(text: str) -> str:
    """Return p2pd's words on one line of at most 200 characters."""
    first_line = " ".join(text.split())
    return first_line if len(first_line) <= 200 else first_line[:200] + "..."
