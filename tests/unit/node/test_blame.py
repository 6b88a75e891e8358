"""A refused record is counted once, and strikes whoever sent what no honest peer sends."""

from __future__ import annotations

import pytest

from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.node.blame import Refused, blame, is_offence
from pulsenet.node.effects import Count, StrikePeer
from pulsenet.testing.fakes import make_key

PEER = make_key("peer")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RemoteProtocolError("schema"), True),
        (RemoteProtocolError("unexpected"), True),
        (TrustError("signature"), True),
        (TrustError("wrong-run"), True),
        (TrustError("rollback"), False),
        (TrustError("untrusted"), False),
        (TrustError("revision-unknown"), False),
    ],
)
def test_only_what_no_honest_peer_sends_is_an_offence(error: Refused, expected: bool) -> None:
    counted = Count("rejected", error.code)
    assert is_offence(error) is expected
    assert blame(error, PEER) == ([counted, StrikePeer(PEER, error.code)] if expected else [counted])
    assert blame(error, None) == [counted]
